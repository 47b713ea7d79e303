"""SuccessorManager: BlockManager for the cache of a model that drafts, whose K and V depend on the next token, too.

A draft model of the kind of EAGLE or MTP computes position i from the target's hidden state at i and from token i + 1.
So its K and V at i stand for tokens[: i + 2], and its cache is a prefix cache over the tokens that follow:

    target's tokens     7   1   2   3 | 4   5   6   8 | ?         n tokens
    draft's positions   0   1   2   3 | 4   5   6   7             n positions
    their tokens        1   2   3   4 | 5   6   8   ?             the successors; token 0 is in the namespace
                                                    the last waits for the token that is sampled next

A cached block is found if all of its tokens and the one after them are the same. That is the block's own key: nothing
has to be dropped, and nothing is found that was computed with another token.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvpage.blocks.explain import MOST_NAMESPACES, Explanation, GroupReach, reach_of_attention
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.sequences.growth import tokens_left_over
from kvpage.blocks.states import Allocation, Ids, SeqId
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.tokens import Tokens, some_tokens
from kvpage.checks.values import as_integer, check_namespace

_TOKEN_BYTES = 4
_UNKNOWN = np.zeros(1, np.int32)  # the place of the token that is not sampled yet; never looked up, never cached


class SuccessorManager(BlockManager):
    """Block tables of the sequences of a model that drafts.

    It has the methods and rules of BlockManager, with two differences. `allocate`, `swap_in` and `explain` take the
    target's tokens, and give room for as many positions. `commit` takes the successors of the positions written.
    Hints of `space`, such as `drop`, take what `successors` returns.

    Args:
        num_blocks: Blocks of the device tier.
        block_size: Positions of a block.
        enable_prefix_caching: Whether sequences share blocks.
        num_host_blocks: Blocks of the host tier.
        share_parts: Whether a new sequence also gets a copy of the longest part of the next block that a cached block
            shares.

    Raises:
        ValueError: A number is out of range.
        TypeError: An argument is of another type.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        num_host_blocks: int = 0,
        share_parts: bool = True,
    ) -> None:
        super().__init__(
            num_blocks,
            block_size,
            enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            share_parts=share_parts,
        )

    def allocate(
        self,
        seq_id: SeqId,
        tokens: Tokens,
        namespace: bytes = b"",
        priority: int = 0,
        max_cached_tokens: int | None = None,
        num_left_over: int = 1,
        cache_at: Sequence[int] = (),
        *,
        num_spare: int = 0,
        is_counted: bool = True,
    ) -> Allocation:
        """Give blocks to a new sequence: room for as many positions as the target has tokens.

        Args:
            seq_id: An id that is not in use.
            tokens: The target's prompt, at least one token.
            namespace: Prefixes are shared within one namespace only.
            priority: 0 to 7. Blocks cached by a sequence of higher priority are evicted later.
            max_cached_tokens: The most positions to share; None for no limit.
            num_left_over: At least that many positions are left to compute. The last position always is.
            cache_at: There are no states to keep.
            num_spare: As for BlockManager.
            is_counted: As for BlockManager.

        Returns:
            How many positions need no computation once the moves are done, and the blocks.

        Raises:
            OutOfBlocks: The rest does not fit.
            ValueError: The id is in use, there are no tokens, or a number is out of range.
            TypeError: An argument is of another type.
        """
        num_left_over = as_integer("num_left_over", num_left_over)
        places, name = _places(tokens, namespace)
        left = num_left_over if num_left_over < 0 else max(num_left_over, 1)
        return super().allocate(
            seq_id, places, name, priority, max_cached_tokens, left, num_spare=num_spare, is_counted=is_counted
        )

    def foresee(self, tokens: Tokens, namespace: bytes = b"", max_cached_tokens: int | None = None) -> int:
        """Return how many positions `allocate` would share now. It changes only how recently blocks were used.

        Args:
            tokens: The target's prompt, at least one token.
            namespace: Where to look.
            max_cached_tokens: As for `allocate`.

        Raises:
            OutOfBlocks: The prompt would not fit.
            ValueError: There are no tokens, or a number is out of range.
            TypeError: An argument is of another type.
        """
        places, name = _places(tokens, namespace)
        left = tokens_left_over(len(places), max_cached_tokens, 1, self.enable_prefix_caching)
        match = self.tree.match(places, name, 0, left, is_hit=False)
        try:
            num_needed = self._sequences.blocks_for(len(places)) - match.num_device_blocks
            part = self.tree.match_part(match, places, left) if self.share_parts else None
            num_free, num_part_tokens = self.num_free_blocks, 0
            if part is not None:
                num_part_tokens = part.num_tokens if num_needed <= num_free else 0
                self.tree.release(part.match)
                num_free = self.num_free_blocks
            if num_needed > num_free:
                raise OutOfBlocks(num_needed, num_free)
            return match.num_tokens + num_part_tokens
        finally:
            self.tree.release(match)

    def check_new(self, seq_id: SeqId) -> None:
        """Raise ValueError if the id is in use."""
        self._sequences.check_new(seq_id)

    def check_append(self, seq_ids: Sequence[SeqId], num_new_tokens: Sequence[int] | int) -> None:
        """Raise OutOfBlocks or ValueError where `append` would."""
        rows = self._sequences.rows_of(seq_ids)
        num_needed = self._sequences.rows.num_blocks_to_append(rows, num_new_tokens)
        if num_needed > self.num_free_blocks:
            raise OutOfBlocks(num_needed, self.num_free_blocks)

    def keep_room(self, seq_id: SeqId, num_tokens: int) -> None:
        """Free the blocks beyond the committed positions, and beyond `num_tokens` positions."""
        num_room = self.state(seq_id).num_tokens
        self.give_back_room(seq_id)
        num_lacking = min(num_room, num_tokens) - self.state(seq_id).num_tokens
        if num_lacking > 0:
            self.append([seq_id], num_lacking)  # blocks that it has just freed

    def swap_in(self, seq_id: SeqId, tokens: Tokens, *, num_spare: int = 0) -> Allocation:
        """Give device blocks to a sequence that is swapped out, with their contents.

        Args:
            seq_id: A sequence that is swapped out.
            tokens: All of the target's tokens: more than there are committed positions.
            num_spare: As for BlockManager.

        Returns:
            The blocks. num_cached_tokens is the number of positions committed before, or less where cached blocks were
            evicted meanwhile.

        Raises:
            OutOfBlocks: The device lacks room.
            ValueError: There are fewer tokens than that.
        """
        return super().swap_in(seq_id, _places(tokens, b"")[0], num_spare=num_spare)

    def reach(self, tokens: Tokens, namespace: bytes = b"") -> GroupReach:
        """Return how far cached positions reach into a prompt, and why not further. Nothing is changed.

        Args:
            tokens: The target's prompt, at least one token.
            namespace: Where to look.

        Returns:
            num_tokens counts positions. differs_at is the place of a token in the prompt.
        """
        places, name = _places(tokens, namespace)
        if not self.enable_prefix_caching:
            return replace(super().explain(places, name).groups[0], group="successor")
        reach = reach_of_attention(self.tree, places[:-1], name, self.share_parts, self.space.rule)
        differs_at = None if reach.differs_at is None else reach.differs_at + 1
        return replace(reach, group="successor", differs_at=differs_at)

    def explain(self, tokens: Tokens, namespace: bytes = b"") -> Explanation:
        """Return how far cached positions reach into a prompt, and why not further. Nothing is changed.

        Args:
            tokens: The target's prompt, at least one token.
            namespace: Where to look.
        """
        reach, tokens = self.reach(tokens, namespace), some_tokens(tokens)
        elsewhere = self._longest_elsewhere(tokens, namespace, reach.num_tokens)
        return Explanation(len(tokens), reach.num_tokens, (reach,), elsewhere)

    def _longest_elsewhere(self, tokens: Ids, namespace: bytes, num_tokens: int) -> tuple[bytes, int] | None:
        """Return the other namespace that has most positions of the prompt, if that is more than `num_tokens`."""
        places, own_name = _places(tokens, namespace)
        first = own_name[:_TOKEN_BYTES]
        names = [name for name in self.tree.names(MOST_NAMESPACES) if name.startswith(first) and name != own_name]
        matches = [(self.tree.look(places[:-1], name)[1], name) for name in names]
        most, name = max(matches, default=(0, b""))
        return (name[_TOKEN_BYTES:], most) if most > num_tokens else None


def successors(tokens: Tokens, namespace: bytes = b"") -> tuple[Ids, bytes]:
    """Return by which tokens, and in which namespace, a SuccessorManager's tree knows a prompt.

    The first token is in the namespace. No two pairs of a token and a namespace give the same.

    Args:
        tokens: The target's tokens, at least one.
        namespace: The prompt's namespace.

    Returns:
        The tokens after the first, int32, and the namespace in the tree.

    Raises:
        ValueError: There are no tokens, or the namespace is too long.
        TypeError: An argument is of another type.
    """
    check_namespace(namespace)
    tokens = some_tokens(tokens)
    return tokens[1:], tokens[:1].astype("<i4").tobytes() + namespace


def _places(tokens: Tokens, namespace: bytes) -> tuple[Ids, bytes]:
    """Return a token for each position, the last of which is not known, and the namespace in the tree."""
    known, name = successors(tokens, namespace)
    return np.concatenate([known, _UNKNOWN]), name
