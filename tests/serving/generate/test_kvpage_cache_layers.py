"""Code that walks a cache finds in a KVPageCache what it finds in a DynamicCache."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers as tf
from support.generate_pools import hands_latents
from support.models import make_model, make_prompts

from kvpage import CacheConfig
from kvpage.serving import KVPageCache, KVPageCachePool

B = 4


class Pair:
    """The same calls, over both caches."""

    def __init__(self, kind: str, num_rows: int, length: int, **fields: object) -> None:
        self.model, self.ids = make_model(kind), torch.tensor(make_prompts([length] * num_rows))
        max_working_bytes = fields.pop("max_working_bytes", None)
        config = CacheConfig(block_size=B, num_gpu_blocks=96, **fields)
        self.pool = KVPageCachePool.from_model(self.model, config, max_working_bytes=max_working_bytes)
        for blocks in self.pool.engine.gpu_cache:
            blocks.fill_(float("nan"))
        self.ours, self.own = KVPageCache(self.pool, self.ids), tf.DynamicCache()

    def forward(self, ids: torch.Tensor) -> None:
        with torch.no_grad():
            found = self.model(ids, past_key_values=self.ours, use_cache=True).logits
            expected = self.model(ids, past_key_values=self.own, use_cache=True).logits
        assert torch.allclose(found, expected, atol=1e-4)

    def both(self, call: Callable[[tf.Cache], object]) -> None:
        call(self.ours)
        call(self.own)

    def check(self) -> None:
        ours, own = self.ours, self.own
        assert len(ours) == len(own) == len(ours.layers)
        assert len(list(ours)) == len(list(own)) == len(own)
        for mine, theirs in zip(ours, own, strict=True):  # pairs, or triples, as the version has it
            assert len(mine) == len(theirs)
            assert_same(mine[:2], theirs[:2])
        for index, (mine, theirs) in enumerate(zip(ours.layers, own.layers, strict=True)):
            assert_same((mine.keys, mine.values), (theirs.keys, theirs.values))
            assert_same(ours[index], (theirs.keys, theirs.values))
            assert_same(ours.to_legacy_cache()[index], (theirs.keys, theirs.values))
            assert mine.get_seq_length() == theirs.get_seq_length() == ours.get_seq_length(index)
            assert mine.is_initialized and theirs.is_initialized and not mine.is_sliding
            for asked in (1, 3):
                try:
                    sizes = own.get_mask_sizes(asked, index)
                except AttributeError:  # older versions ask with the queries' positions
                    sizes = own.get_mask_sizes(torch.arange(asked), index)
                assert ours.get_mask_sizes(asked, index) == mine.get_mask_sizes(asked) == sizes
        assert ours.is_initialized and own.is_initialized
        assert ours.max_batch_size == ours.batch_size == own.layers[0].keys.shape[0]


def assert_same(found: tuple, expected: tuple) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert torch.allclose(mine, theirs, atol=1e-4)


SELECTIONS = {
    "tuple": (2, 0),
    "list": [1],
    "repeated": [0, 0, 2, 1],
    "negative": [-1, 0],
    "tensor": torch.tensor([2, 1]),
    "mask": torch.tensor([True, False, True]),
    "list of flags": [False, True, True],
    "numpy": np.array([1, 2]),
    "range": range(2),
}


@pytest.mark.parametrize("max_working_bytes", [None, 0])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "deepseek_v3", "gpt2"])
def test_a_walk_over_both(kind: str, max_working_bytes: int | None) -> None:
    fields = {"backend": "mla"} if kind == "deepseek_v3" and hands_latents(kind) else {}
    pair = Pair(kind, 3, 2 * B + 1, max_working_bytes=max_working_bytes, **fields)
    pair.forward(pair.ids)
    pair.check()
    for token in (5, 6, 7, 8):
        pair.forward(torch.tensor([[token], [token + 1], [token + 2]]))
    pair.check()
    pair.both(lambda cache: cache.crop(-2))
    pair.check()
    pair.both(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])))
    pair.check()
    pair.forward(torch.tensor([[1, 2], [3, 4], [5, 6]]))
    pair.check()
    pair.both(lambda cache: cache.batch_repeat_interleave(2))
    pair.check()
    pair.forward(torch.arange(20, 26)[:, None])
    pair.both(lambda cache: cache.batch_select_indices(torch.tensor([5, 0])))
    pair.check()
    pair.ours.release()


@pytest.mark.parametrize("name", SELECTIONS)
def test_rows_are_selected_by_whatever_tensors_are_indexed_with(name: str) -> None:
    pair = Pair("llama", 3, B + 1)
    pair.forward(pair.ids)
    pair.both(lambda cache: cache.batch_select_indices(SELECTIONS[name]))
    pair.check()


@pytest.mark.parametrize("wrong", [[3], [-4], [0.5], [], [[0]], "ab", 1, [True, False], [object()], None])
def test_rows_that_are_not_there(wrong: object) -> None:
    pair = Pair("llama", 3, B + 1)
    pair.forward(pair.ids)
    with pytest.raises((ValueError, TypeError)):
        pair.ours.batch_select_indices(wrong)
    pair.check()


@pytest.mark.parametrize("max_working_bytes", [None, 0])
@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 3 * B])
def test_what_was_found_can_be_walked_before_anything_is_computed(length: int, max_working_bytes: int | None) -> None:
    pair = Pair("llama", 2, length, max_working_bytes=max_working_bytes)
    assert not any(layer.is_initialized for layer in pair.ours.layers)
    assert list(pair.ours.to_legacy_cache()) == [(None, None)] * 3
    pair.forward(pair.ids)
    pair.ours.release()
    with KVPageCache(pair.pool, pair.ids) as again:
        found = again.get_seq_length()
        for mine, theirs in zip(again.layers, pair.own.layers, strict=True):
            assert mine.is_initialized == (found > 0)
            if found:
                expected = theirs.keys[:, :, :found], theirs.values[:, :, :found]
                assert_same((mine.keys, mine.values), expected)


def test_what_is_walked_is_a_copy() -> None:
    pair = Pair("llama", 2, 2 * B)
    pair.forward(pair.ids)
    for layer in pair.ours.layers:
        layer.keys.zero_()
        layer.values.fill_(float("nan"))
    pair.check()


def test_one_layer_is_not_changed_alone() -> None:
    pair = Pair("llama", 2, B)
    pair.forward(pair.ids)
    layer = pair.ours.layers[1]
    for call in (layer.reset, lambda: layer.crop(-1), lambda: layer.reorder_cache(torch.tensor([1, 0]))):
        with pytest.raises(ValueError, match="cannot be changed alone"):
            call()
    with pytest.raises(ValueError, match="cannot be set"):
        pair.ours.layers = [layer]
    pair.check()
