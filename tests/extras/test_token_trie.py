"""OutputCache, TokenTrie, DynamicTokenTrie against slow ones; that slices own their bytes; every documented error."""

import gc
import random
import weakref

import pytest
import torch
from support.trie_arrays import kv_of, storage_bytes, walk

from kvpage.extras.token_trie import DynamicTokenTrie, TokenTrie

# --- TokenTrie ---


def test_add_get_has():
    root = TokenTrie()
    assert root.logprobs is None and root.past_key_values is None and root.children == {}
    row = torch.randn(5)
    child = root.add_token(7, row)
    assert root.has_token(7) and not root.has_token(8) and root.get_token(7) is child and child.logprobs is row
    with pytest.raises(KeyError):
        root.get_token(8)
    child.add_token(1)
    again = root.add_token(7)
    assert again is not child and root.children == {7: again} and again.children == {} and again.logprobs is None


@pytest.mark.parametrize(
    "num_tokens, next_token_index, base", [(0, 0, 0), (1, 0, 0), (5, 0, 0), (5, 2, 1), (5, 5, 2), (300, 40, 40)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extend_cache_is_log_softmax_row_by_row(num_tokens, next_token_index, base, dtype):
    token_ids = [i % 7 for i in range(num_tokens)]
    logits = torch.randn(num_tokens - base, 11).to(dtype)
    root = TokenTrie()
    end = root.extend_cache(next_token_index, token_ids, logits, base)
    node = root
    for j in range(next_token_index, num_tokens):
        assert list(node.children) == [token_ids[j]]
        node = node.get_token(token_ids[j])
        assert node.logprobs.dtype == dtype
        torch.testing.assert_close(node.logprobs, torch.log_softmax(logits[j - base], 0))
        assert storage_bytes(node.logprobs) == node.logprobs.nbytes
    assert node is end and end.children == {}


def test_logprobs_of_many_rows_are_made_in_parts(monkeypatch):
    monkeypatch.setattr("kvpage.extras.token_trie.plain.LOGITS_AT_ONCE", 25)
    logits, node = torch.randn(9, 10), TokenTrie()
    node.extend_cache(2, list(range(9)), logits, 0)
    for j in range(2, 9):
        node = node.get_token(j)
        torch.testing.assert_close(node.logprobs, torch.log_softmax(logits[j], 0))


def test_logprobs_own_their_bytes():
    whole = torch.randn(100, 8)
    for trie in (TokenTrie(), DynamicTokenTrie()):
        assert storage_bytes(trie.add_token(1, whole[3]).logprobs) == 32
    assert storage_bytes(DynamicTokenTrie().extend_cache(0, [1, 2], whole[5]).logprobs) == 32


@pytest.mark.parametrize(
    "next_token_index, base, shape, message",
    [
        (4, 0, (3, 5), "next_token_index must be between 0 and 3, got 4"),
        (-1, 0, (3, 5), "got -1"),
        (1, 0, (2, 5), r"with rows 1 to 2, got shape \[2, 5\]"),
        (0, 1, (3, 5), r"with rows -1 to 1"),
        (0, 0, (15,), r"got shape \[15\]"),
    ],
)
def test_extend_cache_refuses_and_adds_nothing(next_token_index, base, shape, message):
    root = TokenTrie()
    with pytest.raises(ValueError, match=message):
        root.extend_cache(next_token_index, [1, 2, 3], torch.zeros(shape), base)
    assert root.children == {}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_logits_are_floats(dtype):
    root = TokenTrie()
    with pytest.raises(ValueError, match=f"logits must be floats of 16 bits or more, got {dtype}"):
        root.extend_cache(0, [1], torch.zeros(1, 5).to(dtype), 0)
    assert root.children == {}


@pytest.mark.parametrize("token_ids", [{0: 1, 1: 2}, {1, 2}], ids=["dict", "set"])
def test_token_ids_must_have_an_order(token_ids):
    """A dict's slice is an unknown key since Python 3.12."""
    for root, given in ((TokenTrie(), (torch.zeros(2, 3), 0)), (DynamicTokenTrie(), ())):
        with pytest.raises(TypeError, match="token_ids must be a sequence, got"):
            root.extend_cache(0, token_ids, *given)
        assert root.children == {}


def test_clear_kv_cache_forgets_all_below():
    root = TokenTrie()
    end = root.extend_cache(0, [1, 2], torch.zeros(2, 3), 0)
    other = root.add_token(5)
    for node in (root, walk(root, [1]), end, other):
        node.past_key_values = "kv"
    walk(root, [1]).clear_kv_cache()
    assert end.past_key_values is None and walk(root, [1]).past_key_values is None
    assert root.past_key_values == other.past_key_values == "kv"
    assert end.logprobs is not None


@pytest.mark.parametrize("kind", [TokenTrie, DynamicTokenTrie])
def test_a_path_of_any_length(kind):
    root = node = kind()
    for i in range(30_000):
        node = node.add_token(i)
    node.past_key_values = "kv"
    assert (
        repr(root) == f"{kind.__name__}(1 children)" and repr(node) == f"{kind.__name__}(0 children, past_key_values)"
    )
    root.clear_kv_cache()
    assert node.past_key_values is None
    gone = weakref.ref(node)
    del root, node
    gc.collect()
    assert gone() is None


# --- DynamicTokenTrie ---


def test_each_node_gets_its_own_slice():
    kv = kv_of(5)
    root = DynamicTokenTrie()
    end = root.extend_cache(1, [9, 1, 2, 3, 4, 5], torch.arange(3.0), kv)
    for i in range(5):
        node = walk(root, range(1, i + 2))
        assert torch.equal(node.past_key_values, kv[:, :, :, i : i + 1])
        assert storage_bytes(node.past_key_values) == node.past_key_values.nbytes
        assert node.depth == i + 1 and (node.logprobs is None) == (node is not end)
    assert end.logprobs.tolist() == [0, 1, 2] and root.count_kv_size() == 5


@pytest.mark.parametrize("at_once", [1, 48, 10**6])
def test_slices_in_parts_and_of_any_layout(monkeypatch, at_once):
    monkeypatch.setattr("kvpage.extras.token_trie.dynamic.KV_AT_ONCE", at_once)
    for kv in (kv_of(1), kv_of(7), kv_of(7).transpose(3, 4).contiguous().transpose(3, 4), kv_of(20)[:, :, :, 3:9]):
        root = DynamicTokenTrie()
        root.extend_cache(0, range(kv.shape[3]), None, kv)
        for i in range(kv.shape[3]):
            piece = walk(root, range(i + 1)).past_key_values
            assert torch.equal(piece, kv[:, :, :, i : i + 1]) and storage_bytes(piece) == piece.nbytes


def test_what_is_there_stays():
    root = DynamicTokenTrie()
    first, second = kv_of(3), kv_of(3)
    end = root.extend_cache(0, [1, 2, 3], torch.zeros(2), first)
    assert root.extend_cache(0, [1, 2, 3], torch.ones(2), second) is end
    assert end.logprobs.tolist() == [0, 0] and torch.equal(end.past_key_values, first[:, :, :, 2:])
    end.store_kv("other")
    end.store_kv(None)
    assert torch.equal(end.past_key_values, first[:, :, :, 2:])
    child = root.add_token(1, torch.ones(2), "other")
    assert child is walk(root, [1]) and child.logprobs.tolist() == [1, 1]
    assert torch.equal(child.past_key_values, first[:, :, :, :1])
    assert root.add_token(1, torch.zeros(2)).logprobs.tolist() == [1, 1]
    assert root.extend_cache(3, [1, 2, 3], torch.ones(2)) is root and root.logprobs.tolist() == [1, 1]


@pytest.mark.parametrize(
    "next_token_index, shape, message",
    [
        (4, None, "next_token_index must be between 0 and 3, got 4"),
        (-1, None, "got -1"),
        (1, (2, 2, 3, 3, 4), r"kv must be \[num_layers, 2, heads, 2, head_size\] for 2 new tokens, got shape"),
        (0, (2, 3, 4), "for 3 new tokens"),
    ],
)
def test_dynamic_extend_cache_refuses_and_adds_nothing(next_token_index, shape, message):
    root = DynamicTokenTrie()
    with pytest.raises(ValueError, match=message):
        root.extend_cache(next_token_index, [1, 2, 3], None, None if shape is None else torch.zeros(shape))
    assert root.children == {} and root.count_kv_size() == 0


def test_max_kv_is_not_negative():
    root = DynamicTokenTrie(past_key_values="kv")
    with pytest.raises(ValueError, match="max_kv must not be negative, got -1"):
        root.evict_lru_kv(-1)
    assert root.past_key_values == "kv"


def test_eviction_frees_the_memory():
    root = DynamicTokenTrie()
    root.extend_cache(0, range(8), None, kv_of(8))
    storages = [weakref.ref(n.past_key_values.untyped_storage()) for n in root.collect_nodes_with_kv()]
    assert all(storage() is not None for storage in storages)
    root.evict_lru_kv(3)
    assert sum(storage() is None for storage in storages) == 5


def test_any_object_may_be_k_and_v():
    root = DynamicTokenTrie()
    root.add_token(1, None, ("k", "v"))
    root.add_token(2).past_key_values = 0  # not None
    assert root.count_kv_size() == 2
    root.evict_lru_kv(1)
    assert root.get_token(1).past_key_values is None and root.get_token(2).past_key_values == 0


class Slow:
    """A trie as plain dicts by path: a use stamps the whole path, and eviction looks at all."""

    def __init__(self):
        self.used, self.kv, self.clock = {(): 0}, set(), 0

    def touch(self, path):
        self.clock += 1
        for n in range(len(path) + 1):
            self.used[path[:n]] = self.clock

    def evict(self, top, max_kv):
        mine = [p for p in self.kv if p[: len(top)] == top]
        mine.sort(key=lambda p: (self.used[p], -len(p)))
        self.kv -= set(mine[: max(len(mine) - max_kv, 0)])


def check(root):
    """The counts that the trie keeps, counted again, and that every KV-leaf is listed once."""
    nodes = list(root._nodes())
    for node in nodes:
        live = [c for c in node.children.values() if c._kv is not None or c.num_live > 0]
        assert node.num_live == len(live)
    listed, node = [], root._use.newer
    while node is not root._use:
        listed.append(node)
        assert node._kv is not None and node.newer.older is node
        node = node.newer
    assert len(set(listed)) == len(listed)
    assert {n for n in nodes if n._kv is not None and n.num_live == 0} <= set(listed)
    assert root.count_kv_size() == sum(n._kv is not None for n in nodes)


@pytest.mark.parametrize("seed", range(40))
def test_a_random_life_evicts_as_the_slow_one(seed):
    rng = random.Random(seed)
    root, slow, dense = DynamicTokenTrie(), Slow(), seed % 2 == 0
    for step in range(150):
        path = rng.choice(list(slow.used))
        path = path[: rng.randint(0, len(path))]
        node, act = walk(root, path), rng.random()
        below = {p for p in slow.kv if p[: len(path)] == path}
        assert node.count_kv_size() == len(below) == len(set(node.collect_nodes_with_kv())), (seed, step)
        if act < 0.45:
            new = tuple(rng.randrange(3) for _ in range(rng.randrange(5)))
            kv = kv_of(len(new)) if dense or rng.random() < 0.5 else None
            end = node.extend_cache(len(path), [*path, *new], None, kv)
            assert end is walk(root, path + new)
            slow.touch(path + new)
            slow.kv |= {path + new[: n + 1] for n in range(len(new))} if kv is not None else set()
        elif act < 0.6:
            token, kv = rng.randrange(3), "kv" if dense or rng.random() < 0.3 else None
            node.add_token(token, None, kv)
            slow.touch((*path, token))
            slow.kv |= {(*path, token)} if kv is not None else set()
        elif act < 0.75:
            node.touch()
            slow.touch(path)
        elif act < 0.9:
            max_kv = rng.randint(0, len(below) + 1)
            node.evict_lru_kv(max_kv)
            slow.evict(path, max_kv)
        elif act < 0.96:
            node.past_key_values = None
            slow.kv.discard(path)
        elif path:
            node.clear_kv_cache()
            slow.kv -= below
        check(root)
        have = {p for p in slow.used if walk(root, p).past_key_values is not None}
        assert have == slow.kv, (seed, step)
    root.evict_lru_kv(0)
    assert root.collect_nodes_with_kv() == []


@pytest.mark.parametrize("kv", ["kv", None])
def test_steps_do_not_grow_with_depth(kv):
    """Adding a token at depth n, and evicting the last of n, looks at no more nodes the deeper it is."""
    seen = []

    class Counted(DynamicTokenTrie):
        __slots__ = ()

        @property
        def parent(self):
            seen.append(self)
            return DynamicTokenTrie.parent.__get__(self)

        @parent.setter
        def parent(self, value):
            DynamicTokenTrie.parent.__set__(self, value)

    root = node = Counted()
    for i in range(2000):
        node = node.add_token(i, None, kv)
        node.touch()
    assert 2000 <= len(seen) <= 20 * 2000
    seen.clear()
    root.evict_lru_kv(1990)
    assert len(seen) <= 10 * 10
