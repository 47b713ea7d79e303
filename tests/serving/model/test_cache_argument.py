"""The name of a forward's cache: transformers has called it differently."""

import inspect
import warnings

import pytest
import torch
import transformers as tf
from support.generate_pools import B, check_drained, make_pool, model_of, rows_of
from support.models import make_prompts

from kvpage.serving import KVPageCache
from kvpage.serving.model.hf_cache.argument import (
    CACHE_ARGUMENTS,
    KV_ARGUMENTS,
    cache_argument,
    checked_cache_argument,
    given_cache,
)


class Old:
    def forward(self, input_ids, past_key_values=None, **kwargs): ...


class New:
    def forward(self, input_ids, cache=None, **kwargs): ...


class Mamba:
    def forward(self, input_ids, cache_params=None): ...


class Without:
    def forward(self, input_ids, **kwargs): ...


@pytest.mark.parametrize(
    ("kind", "of_kv", "of_any"),
    [
        (Old, "past_key_values", "past_key_values"),
        (New, "cache", "cache"),
        (Mamba, None, "cache_params"),
        (Without, None, None),
    ],
)
def test_names(kind: type, of_kv: str | None, of_any: str | None) -> None:
    model = kind()
    for names, expected in ((KV_ARGUMENTS, of_kv), (CACHE_ARGUMENTS, of_any)):
        assert cache_argument(model.forward, names) == expected
        if expected is not None:
            assert checked_cache_argument(model, names) == expected
            continue
        with pytest.raises(ValueError, match=f"^forward must take {' or '.join(names)}, that of {kind.__name__} does"):
            checked_cache_argument(model, names)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [({}, None), ({"cache": 1}, 1), ({"past_key_values": 2}, 2), ({"cache": 3, "past_key_values": None}, 3)],
)
def test_the_cache_of_a_call(arguments: dict[str, object], expected: object) -> None:
    assert given_cache(arguments) == expected


@pytest.mark.parametrize("name", KV_ARGUMENTS)
def test_each_name_that_a_model_takes(name: str) -> None:
    """transformers 5.24 takes the older name, too. Both give the same tokens, and the second call finds the first."""
    model, pool = model_of("llama"), make_pool("llama")
    if name == "cache" and name not in inspect.signature(model.forward).parameters:
        pytest.skip(f"transformers {tf.__version__} calls it past_key_values")
    ids = rows_of(*make_prompts([3 * B + 1]))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for num_found in (0, 3 * B):
            with KVPageCache(pool, ids) as cache:
                assert cache.get_seq_length() == num_found
                assert torch.equal(model.generate(ids, **{name: cache}, **options), expected)
        with KVPageCache(pool, ids) as cache, torch.no_grad():
            found = model(ids[:, cache.get_seq_length() :], **{name: cache}).logits[0, -1]
            assert torch.allclose(found, model(ids).logits[0, -1], atol=1e-5)
    check_drained(pool)
