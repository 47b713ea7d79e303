"""Token tries: a node a token, with what a model said after it and the K and V of the token itself.

    root ── 5 ── 9 ── 2*        node: children by token id
              └─ 7* ── 1*       logprobs  [vocab_size], of the token after it; None if not computed
                                past_key_values (*), K and V of its token; None if absent or evicted

What a node keeps it owns: never a view into the output of a whole forward pass, which would live as long as any of its
slices. So what is evicted is freed.

No call recurses, so a path may be as long as it likes. None is safe to use from several threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from kvpage.checks.tensors import check_dense
from kvpage.checks.values import as_integer
from kvpage.extras.output_cache import OutputCache
from kvpage.extras.owned_arrays import check_array, copied, owned

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

__all__ = ["DynamicTokenTrie", "OutputCache", "TokenTrie"]

LOGITS_AT_ONCE = 1 << 22  # in log_softmax: what is needed beside the result
KV_AT_ONCE = 1 << 14  # elements: they stay in the CPU's cache, and torch does not wake its threads for them
TOKEN_DIM = 3  # of K and V [num_layers, 2, heads, num_tokens, head_size]


class TokenTrie:
    """A node, and with it the trie below; whoever holds the root holds it all.

    children: the child of each token id. logprobs: [vocab_size] on the CPU, of the token that follows, or None. A
    tensor, or the array that the caller gave.
    past_key_values: whatever the caller keeps with the token, or None.
    """

    __slots__ = ("children", "logprobs", "past_key_values", "__weakref__")

    children: dict[int, Self]
    logprobs: Any
    past_key_values: Any

    def __init__(self, parent: TokenTrie | None = None, logprobs: Any = None) -> None:
        """A node that is in nobody's `children` yet; add_token makes those. `parent` is not kept."""
        self.children = {}
        self.logprobs = logprobs
        self.past_key_values = None

    def __repr__(self) -> str:
        has = [name for name in ("logprobs", "past_key_values") if getattr(self, name) is not None]
        return f"{type(self).__name__}({len(self.children)} children{''.join(f', {name}' for name in has)})"

    def has_token(self, token_id: int) -> bool:
        return token_id in self.children

    def get_token(self, token_id: int) -> Self:
        """KeyError if there is no such child."""
        return self.children[token_id]

    def add_token(self, token_id: int, logprobs: Any = None) -> Self:
        """A new child, in place of one that is there, with all below it."""
        if logprobs is not None:
            check_array("logprobs", logprobs)
        child = self.children[token_id] = type(self)(self, None if logprobs is None else owned(logprobs))
        return child

    def extend_cache(self, next_token_index: int, token_ids: Sequence[int], logits: torch.Tensor, base: int) -> Self:
        """Adds a path below this node, of token_ids[next_token_index:], and returns its end.

        logits: [num_rows, vocab_size], of which row j - base is of the token after token_ids[j]. Each node gets the
        log_softmax of its row, in the dtype of the logits, on the CPU. One transfer for some hundred rows.

        ValueError, with nothing added, if rows or indices do not reach from next_token_index to the end, or for logits
        that are no floats of 16 bits or more.
        """
        num_new = _num_new(next_token_index, token_ids)
        check_dense("logits", logits)
        if logits.device.type == "meta":
            raise ValueError("logits must have numbers, got a tensor on meta")
        if not logits.is_floating_point() or logits.dtype.itemsize < 2:
            raise ValueError(f"logits must be floats of 16 bits or more, got {logits.dtype}")
        base = as_integer("base", base)
        if num_new == 0:
            return self
        first = next_token_index - base
        if logits.dim() != 2 or first < 0 or first + num_new > len(logits):
            raise ValueError(
                f"logits must be [num_rows, vocab_size] with rows {first} to {first + num_new - 1}, "
                f"got shape {list(logits.shape)}"
            )
        node = self
        for token_id, row in zip(token_ids[next_token_index:], _log_softmax_rows(logits, first, num_new), strict=True):
            child = node.children[token_id] = type(self)(node, row)
            node = child
        return node

    def clear_kv_cache(self) -> None:
        """Forgets past_key_values of this node and of all below."""
        for node in self._nodes():
            node.past_key_values = None

    def _nodes(self) -> Iterator[Self]:
        """This node and all below, each before its children."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())


class _KVUse:
    """The nodes of one trie that have K and V, in a ring by last use: what the root and all its nodes share.

        ring ── oldest ── ... ── newest ── back to the ring

    A node without such nodes below it (a KV-leaf) is always listed, and the oldest listed KV-leaf is the one to evict.
    A node above a KV-leaf was used at the latest when that was, so it may be listed earlier than it should, or not at
    all; when one below it goes, it takes that one's place.
    """

    __slots__ = ("clock", "era", "num_kv", "newer", "older")

    def __init__(self) -> None:
        self.clock = 0
        self.era = 0  # the next one begins when a node gets K and V above others, whose keeper it then is
        self.num_kv = 0
        self.newer: Any = self
        self.older: Any = self

    def list_before(self, newer: _KVUse | DynamicTokenTrie, node: DynamicTokenTrie) -> None:
        older = newer.older
        node.older, node.newer = older, newer
        older.newer = newer.older = node

    def unlist(self, node: DynamicTokenTrie) -> None:
        if node.newer is not None:
            node.older.newer, node.newer.older = node.newer, node.older
            node.older = node.newer = None

    def oldest_leaf(self) -> DynamicTokenTrie:
        """Requires one. Unlists nodes that come before their descendants, each once for every time that it was used."""
        while self.newer.num_live > 0:
            self.unlist(self.newer)
        return self.newer


class DynamicTokenTrie(TokenTrie):
    """A TokenTrie whose K and V can be evicted by last use, the nodes and their logprobs remaining.

    past_key_values: K and V of the node's token, an array of whatever shape or any other object, or None. A node counts
    as used when it is added, touched or given K and V, and whenever one below it is. `children` is for reading:
    add_token and extend_cache add to it, and nothing is taken out.
    """

    __slots__ = (
        "depth",
        "last_access",
        "newer",
        "num_live",
        "older",
        "parent",
        "_keeper",
        "_keeper_era",
        "_kv",
        "_use",
    )

    depth: int
    parent: Self | None
    _use: _KVUse

    def __init__(
        self,
        parent: Self | None = None,
        logprobs: Any = None,
        past_key_values: Any = None,
    ) -> None:
        """A root, or with `parent` a node that add_token enters there."""
        self.children = {}
        self.logprobs = logprobs
        self.parent = parent
        self.depth = 0 if parent is None else parent.depth + 1
        self.num_live = 0  # children with K and V at or below them
        self.last_access = 0  # by the trie's clock; of a node with others below, one of those may be later
        self.older: Any = None  # neighbours in the ring of _KVUse
        self.newer: Any = None
        self._keeper: Self | None = None  # what find_keeper found in that era, or what has no K and V any more
        self._keeper_era = -1
        self._use = _KVUse() if parent is None else parent._use
        self._kv: Any = None
        self.store_kv(past_key_values)

    @property
    def past_key_values(self) -> Any:
        return self._kv

    @past_key_values.setter
    def past_key_values(self, kv: Any) -> None:
        if kv is None:
            self._drop_kv()
        else:
            self._keep_kv(owned(kv))

    def touch(self) -> None:
        """This node, and with it all above it, are the last used.

        Only the nearest with K and V takes note: what is above that cannot be evicted before it.
        """
        use = self._use
        use.clock += 1
        self.last_access = use.clock
        keeper = self._find_keeper()
        if keeper._kv is not None:
            keeper.last_access = use.clock
            use.unlist(keeper)
            use.list_before(use, keeper)

    def store_kv(self, past_key_values: Any) -> None:
        """Gives the node K and V, unless it has some already or None is given."""
        if self._kv is None and past_key_values is not None:
            self.past_key_values = past_key_values

    def add_token(  # type: ignore[override]
        self, token_id: int, logprobs: Any = None, past_key_values: Any = None
    ) -> Self:
        """The child of `token_id`, made if it lacks, and touched; it gets what it does not have already."""
        if logprobs is not None:
            check_array("logprobs", logprobs)
        if isinstance(past_key_values, torch.Tensor):
            check_dense("past_key_values", past_key_values)
        child = self.children.get(token_id)
        if child is None:
            child = self.children[token_id] = type(self)(self)
        child.store_kv(past_key_values)
        if child.logprobs is None and logprobs is not None:
            child.logprobs = owned(logprobs)
        child.touch()
        return child

    def extend_cache(  # type: ignore[override]
        self,
        next_token_index: int,
        token_ids: Sequence[int],
        logprobs: Any = None,
        kv: Any = None,
    ) -> Self:
        """Adds the path of token_ids[next_token_index:] below this node where it lacks, and returns its end.

        logprobs: of the token after the last, for the end if it has none.
        kv: K and V of the new tokens, [num_layers, 2, heads, num_tokens, head_size]; each node that has none gets a
            copy of its slice, [num_layers, 2, heads, 1, head_size].
        Both are tensors, or arrays of numpy's or of another library that have a shape and slice alike. Such slices are
        copied by the array's `copy` or `clone`, or as copy.copy does. Takes time in proportion to the new tokens.

        ValueError, with nothing added, for an index beyond token_ids or a kv of another shape or number of tokens.
        TypeError, with nothing added, for what is no array.
        """
        num_new = _num_new(next_token_index, token_ids)
        for name, array in (("logprobs", logprobs), ("kv", kv)):
            if array is not None:
                check_array(name, array)
        if kv is not None and (len(kv.shape) != 5 or kv.shape[TOKEN_DIM] != num_new):
            raise ValueError(
                f"kv must be [num_layers, 2, heads, {num_new}, head_size] for {num_new} new tokens, "
                f"got shape {list(kv.shape)}"
            )
        # An array of another library may fail where it is sliced: then nothing has been added.
        pieces = None if kv is None else _pieces_reversed(kv)
        path = self._extend_path(token_ids[next_token_index:])
        end = path[-1] if path else self
        end.touch()
        if pieces is not None:
            # From the end, so that each node is listed before the one above it.
            for node, piece in zip(reversed(path), pieces, strict=True):
                if node._kv is None:
                    node._keep_kv(piece)
        if end.logprobs is None and logprobs is not None:
            end.logprobs = owned(logprobs)
        return end

    def count_kv_size(self) -> int:
        """How many nodes, this one and below, have K and V. For a root the count is kept."""
        return self._use.num_kv if self.parent is None else len(self.collect_nodes_with_kv())

    def collect_nodes_with_kv(self) -> list[Self]:
        """The nodes with K and V, this one and below, each before those under it. Looks only where there are some."""
        return [node for node in self._live_nodes() if node._kv is not None]

    def evict_lru_kv(self, max_kv: int) -> None:
        """Drops K and V, the least recently used first and a path's end before its beginning, until max_kv nodes of
        this one and below have some.

        From a root it costs what it evicts, and once for each use before; from another node it looks at all nodes with
        K and V below that. ValueError if max_kv is negative.
        """
        max_kv = as_integer("max_kv", max_kv)
        if max_kv < 0:
            raise ValueError(f"max_kv must not be negative, got {max_kv}")
        if self.parent is None:
            while self._use.num_kv > max_kv:
                self._use.oldest_leaf()._drop_kv()
            return
        by_age = self._by_last_use()
        for node in by_age[: max(len(by_age) - max_kv, 0)]:
            node.past_key_values = None

    def clear_kv_cache(self) -> None:
        """Forgets K and V of this node and of all below."""
        for node in self.collect_nodes_with_kv():
            node.past_key_values = None

    def _extend_path(self, token_ids: Sequence[int]) -> list[Self]:
        path, node = [], self
        for token_id in token_ids:
            child = node.children.get(token_id)
            if child is None:
                child = node.children[token_id] = type(self)(node)
            path.append(child)
            node = child
        return path

    def _live_nodes(self) -> Iterator[Self]:
        """The nodes with K and V at or below them, each before its children."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if node._kv is not None or node.num_live > 0:
                yield node
                if node.num_live > 0:
                    waiting.extend(node.children.values())

    def _by_last_use(self) -> list[Self]:
        """collect_nodes_with_kv in the order of eviction: by the last use at or below, then the deepest first."""
        nodes = list(self._nodes())
        used = {node: node.last_access for node in nodes}
        for node in reversed(nodes):
            for child in node.children.values():
                used[node] = max(used[node], used[child])
        with_kv = [node for node in nodes if node._kv is not None]
        return sorted(with_kv, key=lambda node: (used[node], -node.depth))

    def _find_keeper(self) -> Self:
        """The nearest node at or above this one with K and V, or the root. All on the way remember it."""
        era, passed, node = self._use.era, [], self
        while node._kv is None and node.parent is not None:
            passed.append(node)
            known = node._keeper if node._keeper_era == era else None
            node = node.parent if known is None else known
        for below in passed:
            below._keeper, below._keeper_era = node, era
        return node

    def _keep_kv(self, kv: Any) -> None:
        use = self._use
        if self._kv is None:
            use.num_kv += 1
            use.era += bool(self.children)
            if self.num_live == 0:
                self._enliven()
        self._kv = kv
        use.clock += 1
        self.last_access = use.clock
        use.unlist(self)
        use.list_before(use, self)

    def _enliven(self) -> None:
        """Counts this node in the nodes above it, up to one that has K and V at or below it already."""
        parent = self.parent
        while parent is not None:
            parent.num_live += 1
            if parent.num_live > 1 or parent._kv is not None:
                return
            parent = parent.parent

    def _drop_kv(self) -> None:
        """The node with K and V above takes the place of this one, unless it was used later: its turn comes next."""
        if self._kv is None:
            return
        use = self._use
        self._kv = None
        use.num_kv -= 1
        node = self
        while node._kv is None and node.num_live == 0 and node.parent is not None:
            node = node.parent
            node.num_live -= 1
        if node._kv is not None and (node.newer is None or node.last_access < self.last_access):
            node.last_access = max(node.last_access, self.last_access)
            use.unlist(node)
            use.list_before(self, node)
        use.unlist(self)


def _num_new(next_token_index: int, token_ids: Sequence[int]) -> int:
    next_token_index = as_integer("next_token_index", next_token_index)
    if isinstance(token_ids, (Mapping, Set)):
        raise TypeError(f"token_ids must be a sequence, got {type(token_ids).__name__}")
    set(token_ids)  # TypeError for what no node can be found by
    if not 0 <= next_token_index <= len(token_ids):
        raise ValueError(f"next_token_index must be between 0 and {len(token_ids)}, got {next_token_index}")
    return len(token_ids) - next_token_index


def _log_softmax_rows(logits: torch.Tensor, first: int, count: int) -> Iterator[torch.Tensor]:
    """The log_softmax of each of the rows, on the CPU, in memory of its own."""
    step = max(LOGITS_AT_ONCE // max(logits.shape[1], 1), 1)
    for start in range(first, first + count, step):
        stop = min(start + step, first + count)
        yield from map(torch.clone, torch.log_softmax(logits[start:stop], dim=-1).cpu().unbind())


def _pieces_reversed(kv: Any) -> Iterable[Any]:
    """K and V of each token, the last first, in memory of its own."""
    if isinstance(kv, torch.Tensor):
        return _kv_pieces_reversed(kv)
    return [copied(kv[:, :, :, token : token + 1, :]) for token in reversed(range(kv.shape[TOKEN_DIM]))]


def _kv_pieces_reversed(kv: torch.Tensor) -> Iterator[torch.Tensor]:
    """K and V of each token, the last first, [num_layers, 2, heads, 1, head_size] in memory of its own.

    Some tokens are brought together first, which takes a third less time than to gather each by itself.
    """
    num_tokens = kv.shape[TOKEN_DIM]
    step = max(KV_AT_ONCE * num_tokens // max(kv.numel(), 1), 1)
    for stop in range(num_tokens, 0, -step):
        start = max(stop - step, 0)
        part = kv.narrow(TOKEN_DIM, start, stop - start).movedim(TOKEN_DIM, 0).contiguous()
        yield from map(torch.clone, reversed(part.unsqueeze(TOKEN_DIM + 1).unbind()))
