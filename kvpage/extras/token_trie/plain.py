"""TokenTrie: nodes with log-probabilities, and whatever the caller keeps with a token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from kvpage.checks.tensors import check_dense
from kvpage.checks.values import as_integer
from kvpage.extras.owned_arrays import check_array, owned

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

LOGITS_AT_ONCE = 1 << 22  # elements that log_softmax needs beside the result


class TokenTrie:
    """A node, and with it the trie below. The root keeps the whole trie alive.

    Attributes:
        children: The child of each token id.
        logprobs: [vocab_size] on the CPU, of the token that follows, or None. A tensor, or the array that the caller
            gave.
        past_key_values: Any object that the caller keeps with the token, or None.
    """

    __slots__ = ("children", "logprobs", "past_key_values", "__weakref__")

    children: dict[int, Self]
    logprobs: Any
    past_key_values: Any

    def __init__(self, parent: TokenTrie | None = None, logprobs: Any = None) -> None:
        """Make a node that is not yet a child; add_token makes children. `parent` is not kept."""
        self.children = {}
        self.logprobs = logprobs
        self.past_key_values = None

    def __repr__(self) -> str:
        has = [name for name in ("logprobs", "past_key_values") if getattr(self, name) is not None]
        return f"{type(self).__name__}({len(self.children)} children{''.join(f', {name}' for name in has)})"

    def has_token(self, token_id: int) -> bool:
        """Return whether there is a child for `token_id`."""
        return token_id in self.children

    def get_token(self, token_id: int) -> Self:
        """Return the child of `token_id`.

        Raises:
            KeyError: There is no such child.
        """
        return self.children[token_id]

    def add_token(self, token_id: int, logprobs: Any = None) -> Self:
        """Return a new child, in place of an existing one with all nodes below it.

        Args:
            token_id: The child's token.
            logprobs: [vocab_size], of the token after it, or None.

        Raises:
            TypeError: logprobs is no array.
        """
        if logprobs is not None:
            check_array("logprobs", logprobs)
        child = self.children[token_id] = type(self)(self, None if logprobs is None else owned(logprobs))
        return child

    def extend_cache(self, next_token_index: int, token_ids: Sequence[int], logits: torch.Tensor, base: int) -> Self:
        """Add a path below this node, of token_ids[next_token_index:].

        Each node gets the log_softmax of its row, in the dtype of the logits, on the CPU, in one transfer for some
        hundred rows.

        Args:
            next_token_index: Index of the path's first token.
            token_ids: Token ids.
            logits: [num_rows, vocab_size]. Row j - base is of the token after token_ids[j].
            base: Index of the token of the first row.

        Returns:
            The path's end.

        Raises:
            ValueError: Rows or indices do not reach from next_token_index to the end, or logits are no floats of 16
                bits or more. Nothing is added.
            TypeError: An argument is of another type. Nothing is added.
        """
        num_new = num_new_tokens(next_token_index, token_ids)
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
        """Forget past_key_values of this node and of all below it."""
        for node in self._nodes():
            node.past_key_values = None

    def _nodes(self) -> Iterator[Self]:
        """Yield this node and all below it, each before its children."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())


def num_new_tokens(next_token_index: int, token_ids: Sequence[int]) -> int:
    """Return the number of tokens from an index on. Raise ValueError for an index out of range."""
    next_token_index = as_integer("next_token_index", next_token_index)
    if isinstance(token_ids, (Mapping, Set)):
        raise TypeError(f"token_ids must be a sequence, got {type(token_ids).__name__}")
    set(token_ids)  # TypeError for unhashable ids, by which no node is found
    if not 0 <= next_token_index <= len(token_ids):
        raise ValueError(f"next_token_index must be between 0 and {len(token_ids)}, got {next_token_index}")
    return len(token_ids) - next_token_index


def _log_softmax_rows(logits: torch.Tensor, first: int, count: int) -> Iterator[torch.Tensor]:
    """Yield the log_softmax of each of the rows, on the CPU, in memory of its own."""
    step = max(LOGITS_AT_ONCE // max(logits.shape[1], 1), 1)
    for start in range(first, first + count, step):
        stop = min(start + step, first + count)
        yield from map(torch.clone, torch.log_softmax(logits[start:stop], dim=-1).cpu().unbind())
