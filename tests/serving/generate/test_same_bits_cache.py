"""KVPageCachePool(same_bits=True): tokens and logits of `generate` are functions of the model and a row alone."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from support.family import make_family_model
from support.generate_pools import has_hooks, padded, rows_of
from support.models import VOCAB, make_model, make_prompts
from support.same_bits_rows import FRESH, NEW, B, a_life, alone, check, generate, model_of, pool_of
from support.seeds import seed_of

from kvpage import CacheConfig, OutOfBlocks
from kvpage.checks.errors import OptionError
from kvpage.serving import Engine, EngineConfig, KVPageCache, KVPageCachePool, SamplingParams
from kvpage.store import KVStore, KVStoreConfig, metadata_of

DTYPES = torch.float32, torch.bfloat16
KINDS = "llama", "gemma3", "gpt_oss", "mixtral", "deepseek_v3", "gpt2"
HYBRIDS = "qwen3_next", "jamba", "falcon_h1", "lfm2_moe"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, *HYBRIDS])
def test_a_life(kind: str, dtype: torch.dtype) -> None:
    a_life(pool_of(model_of(kind, dtype)), random.Random(seed_of(1)), num_calls=3)


@pytest.mark.parametrize("offset", [1, B - 1, B, B + 1, 8 * B - 1, 8 * B])
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "qwen3_next"])
def test_warm_at_any_offset(kind: str, offset: int) -> None:
    pool, (prompt,) = pool_of(model_of(kind)), make_prompts([8 * B + 1])
    for other in ([*prompt[:offset], 7, 8], [*prompt[:offset], 9]):
        generate(pool, [other])
    check(generate(pool, [prompt]), [alone(pool, prompt)])
    check(generate(pool, [prompt, [5]]), [alone(pool, prompt), alone(pool, [5])])


def test_it_finds_what_it_computed_under_padding() -> None:
    pool, prompts = pool_of(model_of("llama")), make_prompts([5 * B, 2 * B + 1])
    generate(pool, prompts)
    for prompt in prompts:
        with KVPageCache(pool, rows_of(prompt)) as cache:
            assert cache.get_seq_length() >= (len(prompt) - 1) // B * B
    ids, mask = padded(prompts)
    with KVPageCache(pool, ids, mask) as cache:
        assert cache.get_seq_length() >= 5 * B - 2


@pytest.mark.parametrize("position", [1, B, B + 1, 2 * B + 4])
def test_marks_are_of_the_tokens_after_padding(position: int) -> None:
    """A row that is shorter has none."""
    pool, prompts = pool_of(model_of("qwen3_next")), make_prompts([2 * B + 5, B + 1])
    ids, mask = padded(prompts)
    with KVPageCache(pool, ids, mask, cache_at=[position]) as cache:
        pool.model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=1, pad_token_id=0)
    for prompt in prompts:
        if len(prompt) >= position:
            with KVPageCache(pool, rows_of([*prompt[:position], 7])) as cache:
                assert cache.get_seq_length() == position


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_beams_have_the_bits_of_beams_alone(kind: str) -> None:
    """Their rows are repeated, reordered and copied."""
    pool, prompts = pool_of(model_of(kind)), make_prompts([2 * B + 1, 3 * B])
    options = {"num_beams": 3, "num_return_sequences": 2}
    expected = [beams for prompt in prompts for beams in answers(pool, [prompt], next(FRESH).encode(), **options)]
    for _ in range(2):
        assert answers(pool, prompts, **options) == expected


def answers(
    pool: KVPageCachePool, prompts: Sequence[list[int]], namespace: bytes = b"", **options: Any
) -> list[tuple[list[int], float]]:
    """Return the tokens and the score of each beam."""
    ids, mask = padded(list(prompts))
    with KVPageCache(pool, ids, mask, namespace) as cache:
        output = pool.model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=NEW,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    tokens = output.sequences[:, ids.shape[1] :].tolist()
    return list(zip(tokens, output.sequences_scores.tolist(), strict=True))


def test_assisted_generation_has_the_same_bits() -> None:
    pool, prompt = pool_of(model_of("llama")), make_prompts([B])[0] * 3
    (tokens, _), options = alone(pool, prompt), {"prompt_lookup_num_tokens": 3}
    for _ in range(2):
        ((assisted, _),) = generate(pool, [prompt], **options)
        assert assisted == tokens


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "qwen3_next"])
def test_tokens_are_those_of_an_engine(kind: str) -> None:
    model, prompts = model_of(kind), make_prompts([1, B, 5 * B + 2])
    config = CacheConfig(B, 200, backend="mla" if kind == "deepseek_v3" else "flash")
    engine = Engine.from_model(model, EngineConfig(config, same_bits=True))
    outputs = engine.generate(prompts, SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True))
    pool = pool_of(model)
    assert [tokens for tokens, _ in generate(pool, prompts)] == [output.token_ids for output in outputs]


def test_the_logits_are_near_those_of_the_model() -> None:
    model, prompts = model_of("llama"), make_prompts([3, 2 * B])
    ids, mask = padded(prompts)
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, do_sample=False, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    results = generate(pool_of(model), prompts)
    assert [tokens for tokens, _ in results] == output.sequences[:, ids.shape[1] :].tolist()
    torch.testing.assert_close(torch.stack([logits for _, logits in results]), torch.stack(output.logits, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_from_disk(tmp_path: Path, dtype: torch.dtype) -> None:
    model, (prompt,) = model_of("llama", dtype), make_prompts([8 * B + 1])
    config = KVStoreConfig(B, (f"disk://{tmp_path}?size=16MiB&segment=8MiB",))
    first, second = pool_of(model), pool_of(model)
    expected = alone(first, prompt)
    generate(first, [prompt])
    with KVStore(config, metadata_of(first.engine, "m")) as store:
        first.manager.allocate("stored", prompt)
        store.store_blocks(prompt[: 8 * B], first.engine, first.manager.block_ids("stored")[:8])
    with KVStore(config, metadata_of(second.engine, "m")) as store:
        second.manager.allocate("loaded", prompt)
        num_loaded = store.load_blocks(prompt[: 8 * B], second.engine, second.manager.block_ids("loaded"))
        assert num_loaded == 8 * B
        second.manager.commit("loaded", prompt[: 8 * B])
        second.manager.release("loaded")
    with KVPageCache(second, rows_of(prompt)) as cache:
        assert cache.get_seq_length() == 8 * B
    check(generate(second, [prompt]), [expected])


def test_records_name_the_arithmetic() -> None:
    model = model_of("llama")
    plain = KVPageCachePool.from_model(model, CacheConfig(B, 16))
    assert metadata_of(plain.engine, "m").extra == ()
    (extra,) = metadata_of(pool_of(model).engine, "m").extra
    assert extra[0] == "numerics" and torch.__version__ in extra[1]


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_a_forward_that_fails_changes_nothing(kind: str) -> None:
    model, (prompt,) = model_of(kind), make_prompts([3 * B])
    pool = pool_of(model)
    expected = alone(pool, prompt)
    ids = rows_of(prompt)
    with KVPageCache(pool, ids) as cache:
        pool.model(ids[:, :5], past_key_values=cache)
        handle = model.get_output_embeddings().register_forward_pre_hook(broken)
        with pytest.raises(RuntimeError, match="broken"):
            pool.model(ids[:, 5:], past_key_values=cache)
        handle.remove()
        assert cache.get_seq_length() == 5
        logits = pool.model(ids[:, 5:], past_key_values=cache).logits
        assert torch.equal(logits[0, -1].float(), expected[1][0])
    pool.manager.check()


def broken(module: torch.nn.Module, args: tuple) -> None:
    raise RuntimeError("broken")


def test_too_few_blocks() -> None:
    pool, (prompt,) = pool_of(model_of("llama"), 4), make_prompts([3 * B])
    with KVPageCache(pool, rows_of(prompt)) as cache, pytest.raises(OutOfBlocks):
        pool.model.generate(rows_of(prompt), past_key_values=cache, max_new_tokens=3 * B, pad_token_id=0)
    assert pool.manager.stats().num_used_blocks == 0


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_other_models_than_the_pools() -> None:
    model, ids = model_of("llama"), rows_of([5, 6, 7])
    pool, other = pool_of(model), pool_of(model)
    with KVPageCache(pool, ids) as cache:
        with pytest.raises(ValueError, match="generate must be called on the pool's model, .* not on the LlamaForCau"):
            model.generate(ids, past_key_values=cache, max_new_tokens=2)
        with pytest.raises(ValueError, match="must be a KVPageCache of the pool, .* got KVPageCache"):
            other.model.generate(ids, past_key_values=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match="must be a KVPageCache of the pool, .* got DynamicCache"):
        pool.model.generate(ids, max_new_tokens=2)
    with pytest.raises(ValueError, match="must be a KVPageCache of the pool, .* got NoneType"):
        pool.model(ids)
    assert not has_hooks(model) and pool.manager.stats().num_used_blocks == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"output_hidden_states": True}, "output_hidden_states must be left out with same_bits"),
        ({"output_attentions": True}, "output_attentions must be left out"),
        ({"labels": torch.tensor([[1, 2, 3]])}, "labels must be left out"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds must be left out"),
        ({"logits_to_keep": torch.tensor([0])}, "logits_to_keep must be a number of tokens"),
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "attention_mask must be that which the cache was made with"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "attention_mask must be that which the cache was made with"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "attention_mask must be that which the cache was made with"),
        ({"attention_mask": torch.ones(1, 4)}, "attention_mask must be .* up to token 3"),
        ({"position_ids": torch.tensor([[1, 2, 3]])}, "position_ids must count the tokens after the padding"),
        ({"cache_position": torch.tensor([1, 2, 3])}, "cache_position must be that of tokens 0 to 3"),
        ({"use_cache": False}, "use_cache must be True"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], words: str) -> None:
    pool, ids = pool_of(model_of("llama")), rows_of([5, 6, 7])
    with KVPageCache(pool, ids) as cache:
        with pytest.raises(ValueError, match=words):
            pool.model(ids, past_key_values=cache, **arguments)
        assert cache.get_seq_length() == 0
        pool.model(ids, past_key_values=cache)
        assert cache.get_seq_length() == 3


def test_masks_of_the_cache_that_are_refused() -> None:
    pool, ids = pool_of(model_of("llama")), rows_of([5, 6, 7], [5, 6, 8])
    for mask in ([[1, 1, 0], [1, 1, 1]], [[0, 0, 0], [1, 1, 1]], [[1, 0, 1], [1, 1, 1]]):
        with pytest.raises(ValueError, match="attention_mask must show the last tokens of each row"):
            KVPageCache(pool, ids, mask)
    assert pool.manager.stats().num_used_blocks == 0


REFUSED: list[tuple[Callable[[], tf.PreTrainedModel], str]] = [
    (lambda: make_family_model("deepseek_v2"), "DeepseekV2ForCausalLM: it calls aten::polar"),
    (lambda: make_model("llama").double(), "torch.float64, whose products are torch's"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_models_that_are_refused(make: Callable[[], tf.PreTrainedModel], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        pool_of(make())


def test_an_option_of_another_type() -> None:
    with pytest.raises(TypeError, match="same_bits must be a bool, got int"):
        KVPageCachePool.from_model(model_of("llama"), CacheConfig(B, 16), same_bits=1)


def test_prompts_in_the_vocabulary() -> None:
    pool = pool_of(model_of("llama"))
    with pytest.raises(ValueError, match="input_ids must be ids in"):
        KVPageCache(pool, rows_of([5, VOCAB]))
