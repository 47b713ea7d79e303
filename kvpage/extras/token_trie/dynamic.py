"""DynamicTokenTrie: a TokenTrie whose K and V can be evicted by last use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvpage.checks.tensors import check_dense
from kvpage.checks.values import as_integer
from kvpage.extras.owned_arrays import check_array, copied, owned
from kvpage.extras.token_trie.kv_use import KVUse
from kvpage.extras.token_trie.plain import TokenTrie, num_new_tokens

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

KV_AT_ONCE = 1 << 14  # elements: they stay in the CPU's cache, and torch does not wake its threads for them
TOKEN_DIM = 3  # of K and V [num_layers, 2, heads, num_tokens, head_size]


class DynamicTokenTrie(TokenTrie):
    """A TokenTrie whose K and V can be evicted by last use, while the nodes and their logprobs remain.

    A node counts as used when it is added, touched or given K and V, and whenever a node below it is. `children` is for
    reading: add_token and extend_cache add to it, and no child is taken out.

    Attributes:
        depth: Number of tokens from the root.
        parent: The node above; None at the root.
        past_key_values: K and V of the node's token, an array of any shape or any other object, or None.
        last_access: Time of the last use, on the trie's clock.
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
    _use: KVUse

    def __init__(
        self,
        parent: Self | None = None,
        logprobs: Any = None,
        past_key_values: Any = None,
    ) -> None:
        """Make a root, or with `parent` a node that add_token enters there."""
        self.children = {}
        self.logprobs = logprobs
        self.parent = parent
        self.depth = 0 if parent is None else parent.depth + 1
        self.num_live = 0  # children with K and V at or below them
        self.last_access = 0  # by the trie's clock; a lower node may have a later access
        self.older: Any = None  # neighbours in the ring of KVUse
        self.newer: Any = None
        self._keeper: Self | None = None  # as _find_keeper found it in that era; it may have no K and V any more
        self._keeper_era = -1
        self._use = KVUse() if parent is None else parent._use
        self._kv: Any = None
        self.store_kv(past_key_values)

    @property
    def past_key_values(self) -> Any:
        return self._kv

    @past_key_values.setter
    def past_key_values(self, kv: Any) -> None:
        """K and V of the node's token, or None."""
        if kv is None:
            self._drop_kv()
        else:
            self._keep_kv(owned(kv))

    def touch(self) -> None:
        """Make this node, and with it all nodes above it, the last used.

        Only the nearest node with K and V is listed anew: nodes above it cannot be evicted before it.
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
        """Give the node K and V, unless it has some already or None is given.

        Args:
            past_key_values: K and V of the node's token, or None.
        """
        if self._kv is None and past_key_values is not None:
            self.past_key_values = past_key_values

    def add_token(self, token_id: int, logprobs: Any = None, past_key_values: Any = None) -> Self:
        """Return the child of a token, which is made if missing, and touch it. It gets only arrays that it lacks.

        Args:
            token_id: The child's token.
            logprobs: [vocab_size], of the token after it, or None.
            past_key_values: K and V of the token, or None.

        Raises:
            TypeError: logprobs is no array.
        """
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

    def extend_cache(
        self,
        next_token_index: int,
        token_ids: Sequence[int],
        logprobs: Any = None,
        kv: Any = None,
    ) -> Self:
        """Add the path of token_ids[next_token_index:] below this node where it is missing. Only new tokens take time.

        `logprobs` and `kv` are tensors, or arrays of numpy's or of another library that have a shape and slice alike.
        Slices are copied by the array's `copy` or `clone`, or as copy.copy does.

        Args:
            next_token_index: Index of the path's first token.
            token_ids: Token ids.
            logprobs: [vocab_size], of the token after the last, for the end if it has none.
            kv: K and V of the new tokens, [num_layers, 2, heads, num_tokens, head_size]. Each node that has none gets a
                copy of its slice, [num_layers, 2, heads, 1, head_size].

        Returns:
            The path's end.

        Raises:
            ValueError: The index is beyond token_ids, or kv has another shape or number of tokens. Nothing is added.
            TypeError: An argument is no array. Nothing is added.
        """
        num_new = num_new_tokens(next_token_index, token_ids)
        for name, array in (("logprobs", logprobs), ("kv", kv)):
            if array is not None:
                check_array(name, array)
        if kv is not None and (len(kv.shape) != 5 or kv.shape[TOKEN_DIM] != num_new):
            raise ValueError(
                f"kv must be [num_layers, 2, heads, {num_new}, head_size] for {num_new} new tokens, "
                f"got shape {list(kv.shape)}"
            )
        # An array of another library may fail where it is sliced: then nothing has been added.
        slices = None if kv is None else _slices_reversed(kv)
        path = self._extend_path(token_ids[next_token_index:])
        end = path[-1] if path else self
        end.touch()
        if slices is not None:
            # From the end, so that each node is listed before the one above it.
            for node, part in zip(reversed(path), slices, strict=True):
                if node._kv is None:
                    node._keep_kv(part)
        if end.logprobs is None and logprobs is not None:
            end.logprobs = owned(logprobs)
        return end

    def count_kv_size(self) -> int:
        """Return the number of nodes with K and V, this one and below. A root keeps the number."""
        return self._use.num_kv if self.parent is None else len(self.collect_nodes_with_kv())

    def collect_nodes_with_kv(self) -> list[Self]:
        """Return the nodes with K and V, this one and below, each before the nodes under it."""
        return [node for node in self._live_nodes() if node._kv is not None]

    def evict_lru_kv(self, max_kv: int) -> None:
        """Drop K and V, the least recently used first, until at most max_kv nodes of this one and below have some.

        A path's end goes before its beginning. From a root the cost is that of the evicted nodes and of earlier uses.
        From another node it is that of all nodes with K and V below.

        Args:
            max_kv: How many nodes keep K and V.

        Raises:
            ValueError: max_kv is negative.
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
        """Forget K and V of this node and of all below it."""
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
        """Yield the nodes with K and V at or below them, each before its children."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if node._kv is not None or node.num_live > 0:
                yield node
                if node.num_live > 0:
                    waiting.extend(node.children.values())

    def _by_last_use(self) -> list[Self]:
        """Return collect_nodes_with_kv in the order of eviction: by last use at or below, then the deepest first."""
        nodes = list(self._nodes())
        used = {node: node.last_access for node in nodes}
        for node in reversed(nodes):
            for child in node.children.values():
                used[node] = max(used[node], used[child])
        with_kv = [node for node in nodes if node._kv is not None]
        return sorted(with_kv, key=lambda node: (used[node], -node.depth))

    def _find_keeper(self) -> Self:
        """Return the nearest node at or above this one with K and V, or the root. All nodes on the way remember it."""
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
        """Count this node in the nodes above it, up to one that has K and V at or below it already."""
        parent = self.parent
        while parent is not None:
            parent.num_live += 1
            if parent.num_live > 1 or parent._kv is not None:
                return
            parent = parent.parent

    def _drop_kv(self) -> None:
        """Drop K and V. The next node above with K and V takes this one's place in the ring, or keeps a later one."""
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


def _slices_reversed(kv: Any) -> Iterable[Any]:
    """Return K and V of each token, the last first, in memory of its own."""
    if isinstance(kv, torch.Tensor):
        return _tensor_slices_reversed(kv)
    return [copied(kv[:, :, :, token : token + 1, :]) for token in reversed(range(kv.shape[TOKEN_DIM]))]


def _tensor_slices_reversed(kv: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield K and V of each token, the last first, [num_layers, 2, heads, 1, head_size] in memory of its own.

    Some tokens are gathered together first, which takes a third less time than one by one.
    """
    num_tokens = kv.shape[TOKEN_DIM]
    step = max(KV_AT_ONCE * num_tokens // max(kv.numel(), 1), 1)
    for stop in range(num_tokens, 0, -step):
        start = max(stop - step, 0)
        part = kv.narrow(TOKEN_DIM, start, stop - start).movedim(TOKEN_DIM, 0).contiguous()
        yield from map(torch.clone, reversed(part.unsqueeze(TOKEN_DIM + 1).unbind()))
