"""DynamicTokenTrie with arrays of other libraries, and as an application uses it."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.trie_arrays import HEADS, LAYERS, SIZE, kv_of, walk

from kvpage.extras.token_trie import DynamicTokenTrie

# --- arrays of other libraries ---------------------------------------------------------------------------------------


class Slices:
    """An array that has a shape, slices, and nothing else that a node could need; it keeps what it is a slice of."""

    def __init__(self, numbers, of=None):
        self._numbers, self.of = numbers, of

    @property
    def shape(self):
        return self._numbers.shape

    def __getitem__(self, key):
        return type(self)(self._numbers[key], self)

    def __copy__(self):
        return type(self)(self._numbers.copy())


class Cloneable(Slices):
    def clone(self):
        return type(self)(self._numbers.copy())


KINDS = {"numpy": lambda numbers: numbers, "copied": Slices, "cloned": Cloneable}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_each_node_gets_its_slice_of_an_array_in_kind(kind, num_tokens):
    numbers = kv_of(num_tokens).numpy()
    kv = KINDS[kind](numbers)
    root = DynamicTokenTrie()
    logprobs = KINDS[kind](np.arange(3.0))
    end = root.extend_cache(1, range(num_tokens + 1), logprobs, kv)
    assert end is walk(root, range(1, num_tokens + 1)) and root.count_kv_size() == num_tokens
    assert type(end.logprobs) is type(logprobs)
    for i in range(num_tokens):
        piece = walk(root, range(1, i + 2)).past_key_values
        assert type(piece) is type(kv) and piece.shape == (LAYERS, 2, HEADS, 1, SIZE)
        held = piece if kind == "numpy" else piece._numbers
        assert np.array_equal(held, numbers[:, :, :, i : i + 1])
        assert held.base is None and getattr(piece, "of", None) is None  # its own
    if num_tokens:
        numbers[:] = 0
        assert held.any()


def test_a_view_of_an_array_is_copied_and_a_whole_one_is_not():
    whole, root = np.ones((4, 3)), DynamicTokenTrie()
    assert root.add_token(1, whole, whole).past_key_values is whole and root.get_token(1).logprobs is whole
    row = root.add_token(2, whole[1], whole[2:])
    assert row.past_key_values.base is None and row.logprobs.base is None
    row.past_key_values = whole[:1]
    assert row.past_key_values.base is None and np.array_equal(row.past_key_values, whole[:1])


def test_arrays_that_are_there_stay():
    root, kv = DynamicTokenTrie(), kv_of(2).numpy()
    end = root.extend_cache(0, [1, 2], np.zeros(2), kv)
    assert root.extend_cache(0, [1, 2], np.ones(2), kv + 1) is end
    assert not end.logprobs.any() and np.array_equal(end.past_key_values, kv[:, :, :, 1:])


class Refuses(Slices):
    def __getitem__(self, key):
        raise RuntimeError("no memory")


@pytest.mark.parametrize(
    "kv, error, message",
    [
        (np.zeros((2, 2, 3, 3, 4)), ValueError, r"kv must be \[num_layers, 2, heads, 2, head_size\] for 2 new tokens"),
        (np.zeros((2, 3)), ValueError, "for 2 new tokens"),
        (np.float32(1), ValueError, r"got shape \[\]"),
        ([1, 2], TypeError, "kv must be a tensor or an array that slices, got list"),
        ("kv", TypeError, "kv must be a tensor or an array that slices, got str"),
        (Refuses(np.zeros((2, 2, 3, 2, 4))), RuntimeError, "no memory"),
        (SimpleNamespace(shape=(2, 2, 3, 2, 4)), TypeError, "an array that slices, got SimpleNamespace"),
        (SimpleNamespace(shape="ab", __getitem__=None), TypeError, "an array that slices, got SimpleNamespace"),
        (torch.zeros(2, 2, 3, 2, 4).to_sparse(), ValueError, "kv must be a tensor with strides"),
    ],
)
def test_what_is_no_array_of_the_tokens_adds_nothing(kv, error, message):
    root = DynamicTokenTrie()
    with pytest.raises(error, match=message):
        root.extend_cache(1, [1, 2, 3], None, kv)
    assert root.children == {} and root.count_kv_size() == 0
    with pytest.raises(TypeError, match="logprobs must be a tensor or an array that slices, got int"):
        root.extend_cache(0, [1], 7)
    assert root.children == {}


def test_a_batch_of_queries_on_a_timer_answers_each():
    """The way servers of another library use a trie: one that raised in a timer's callback would leave all waiting."""
    trie = DynamicTokenTrie()
    prompts = {(1, 2, 3): Slices(kv_of(3).numpy()), (1, 2, 4): kv_of(3).numpy(), (5,): kv_of(1)}

    async def ask():
        loop = asyncio.get_running_loop()
        futures = {prompt: loop.create_future() for prompt in prompts}

        def answer():
            for prompt, future in futures.items():
                end = trie.extend_cache(0, list(prompt), np.arange(4.0), prompts[prompt])
                future.set_result(end.logprobs)

        loop.call_later(0, answer)
        return await asyncio.wait_for(asyncio.gather(*futures.values()), 10)

    assert [list(row) for row in asyncio.run(ask())] == [[0, 1, 2, 3]] * 3
    assert trie.count_kv_size() == 5
