"""DraftedManager: a target's blocks and those of the model that drafts for it, side by side.

A draft model of the kind of EAGLE or MTP computes position i from the target's hidden state at i and from token i + 1.
So its K and V at i stand for tokens[: i + 2], and its cache is a prefix cache over the tokens that follow:

    target's tokens     7   1   2   3 | 4   5   6   8 | ?         n tokens
    draft's positions   0   1   2   3 | 4   5   6   7             n positions
    their tokens        1   2   3   4 | 5   6   8   ?             the successors; token 0 is in the namespace
                                                    the last waits for the token that is sampled next

A cached block is found if all of its tokens and the one after them are the same. That is the block's own key: nothing
has to be dropped, and nothing is found that was computed with another token. So each of the two models has an ordinary
BlockManager: `target` of the tokens, `drafts` of what `positions` returns.

    allocate          the target begins at t, the draft model at d >= t: it needs the target's hidden states from d on
    append            room for both
    target.do_moves, drafts.do_moves ─► the target's step ─► the draft model's step
    commit            tokens of the target, successors of the draft model's positions
    release           both
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvpage.blocks.explain import Explanation, GroupReach, Searched, reach_of_attention
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.sequence_state import Allocation, Ids, SeqId
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.interrupts import uninterrupted
from kvpage.checks.tokens import Tokens, as_tokens, some_tokens
from kvpage.checks.values import as_list, check_namespace

_TOKEN_BYTES = 4
_UNKNOWN = np.zeros(1, np.int32)  # the place of the token that is not sampled yet; never looked up, never cached


def positions(tokens: Tokens, namespace: bytes = b"") -> tuple[Ids, bytes]:
    """Return by which tokens, and in which namespace, the draft model's manager knows a prompt.

    No two pairs of a first token and a namespace give the same namespace.

    Args:
        tokens: The target's tokens, at least one.
        namespace: The prompt's namespace.

    Returns:
        The token after each position, int32 [num_tokens], the last of which is not known, and the namespace.

    Raises:
        ValueError: There are no tokens, or the namespace is too long.
        TypeError: An argument is of another type.
    """
    check_namespace(namespace)
    tokens = some_tokens(tokens)
    return np.concatenate([tokens[1:], _UNKNOWN]), tokens[:1].astype("<i4").tobytes() + namespace


class DraftedAllocation(NamedTuple):
    """The blocks that a sequence was given for both models.

    Attributes:
        target: The target's. It begins at target.num_cached_tokens.
        drafts: The draft model's. It begins at the position drafts.num_cached_tokens, which is not before the target's.
    """

    target: Allocation
    drafts: Allocation

    @property
    def num_cached_tokens(self) -> int:
        """Leading tokens that neither model computes again."""
        return self.target.num_cached_tokens


class DraftedManager:
    """Sequences of a target and of the model that drafts for it.

    As in BlockManager, each method gives all or nothing, and raises KeyError for an unknown sequence. Calls for one
    model, such as tables, slots, moves, swaps and statistics, go to that model's manager.

    Args:
        target: The target's manager, also with windows or states. The caller's; without sequences.
        drafts: The draft model's manager, without groups. The caller's; without sequences.

    Raises:
        ValueError: The two are one, or `drafts` has groups.
        TypeError: An argument is of another type.
    """

    def __init__(self, target: BlockManager, drafts: BlockManager) -> None:
        for name, manager in (("target", target), ("drafts", drafts)):
            if not isinstance(manager, BlockManager):
                raise TypeError(f"{name} must be a BlockManager, got {type(manager).__name__}")
        if target is drafts:
            raise ValueError("drafts must be another manager than target, got the same")
        if drafts.windows or drafts.states:
            raise ValueError("drafts must have no groups, got some")
        self.target = target
        self.drafts = drafts

    @uninterrupted
    def allocate(
        self,
        seq_id: SeqId,
        tokens: Tokens,
        namespace: bytes = b"",
        priority: int = 0,
        max_cached_tokens: int | None = None,
        num_left_over: int = 1,
        cache_at: Sequence[int] = (),
    ) -> DraftedAllocation:
        """Give blocks of both models to a new sequence.

        Args:
            seq_id: An id that is not in use.
            tokens: The prompt, at least one token.
            namespace: Prefixes are shared within one namespace only.
            priority: 0 to 7. Blocks cached by a sequence of higher priority are evicted later.
            max_cached_tokens: The longest prefix that the target shares; None for no limit.
            num_left_over: At least that many of the target's tokens are left to compute.
            cache_at: As for BlockManager.allocate, of the target.

        Raises:
            OutOfBlocks: The prompt does not fit into a pool.
            ValueError: The id is in use, there are no tokens, or a number is out of range.
            TypeError: An argument is of another type.
        """
        places, name = positions(tokens, namespace)
        num_drafted = self._foresee(seq_id, places, name)
        most = num_drafted if max_cached_tokens is None else min(max_cached_tokens, num_drafted)
        target = self.target.allocate(seq_id, tokens, namespace, priority, most, num_left_over, cache_at)
        return DraftedAllocation(target, self.drafts.allocate(seq_id, places, name, priority))

    @uninterrupted
    def append(self, seq_ids: Sequence[SeqId], num_new_tokens: Sequence[int] | int = 1) -> None:
        """Make room for more tokens in each sequence, of both models. Raise as BlockManager.append does."""
        seq_ids, drafts = as_list("seq_ids", seq_ids), self.drafts
        num_needed = drafts.rows.num_blocks_to_append(drafts.rows.of(seq_ids), num_new_tokens)
        if num_needed > drafts.num_free_blocks:
            raise OutOfBlocks(num_needed, drafts.num_free_blocks)
        self.target.append(seq_ids, num_new_tokens)
        drafts.append(seq_ids, num_new_tokens)

    @uninterrupted
    def commit(self, seq_id: SeqId, tokens: Tokens, successors: Tokens) -> None:
        """Record what a step has written: K and V of the target's `tokens`, and of as many positions as `successors`.

        Args:
            seq_id: The sequence.
            tokens: The target's tokens. They follow those cached or committed before.
            successors: The tokens after the draft model's positions, which follow those cached or committed before.

        Raises:
            ValueError: There is no room for that many tokens or positions.
        """
        tokens, successors = as_tokens(tokens), as_tokens(successors)
        _check_room("tokens", self.target, seq_id, len(tokens))
        _check_room("successors", self.drafts, seq_id, len(successors))
        self.target.commit(seq_id, tokens)
        self.drafts.commit(seq_id, successors)

    @uninterrupted
    def give_back_room(self, seq_id: SeqId) -> None:
        """Free the blocks beyond the target's committed tokens, as after drafts that were refused.

        The draft model keeps room for as many positions.
        """
        self.target.give_back_room(seq_id)
        num_kept = min(self.drafts.state(seq_id).num_tokens, self.target.state(seq_id).num_written)
        self.drafts.give_back_room(seq_id)
        num_lacking = num_kept - self.drafts.state(seq_id).num_tokens
        if num_lacking > 0:
            self.drafts.append([seq_id], num_lacking)  # blocks that it has just freed

    @uninterrupted
    def release(self, seq_id: SeqId) -> None:
        """End a sequence of both models. Its cached blocks can be found until they are evicted."""
        self.target.release(seq_id)
        self.drafts.release(seq_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks of both models. Raise as BlockManager.reset_prefix_cache does."""
        self.target.reset_prefix_cache()
        self.drafts.reset_prefix_cache()

    def explain(self, tokens: Tokens, namespace: bytes = b"", searched: Searched = "all") -> Explanation:
        """Return how far each group of both models reaches into a prompt, and why not further. Nothing is changed.

        Args:
            tokens: A prompt.
            namespace: Where to look.
            searched: See BlockManager.explain.

        Returns:
            Of the group "successor", num_tokens counts positions, and differs_at is the place of a token in the prompt.
        """
        tokens = some_tokens(tokens)
        explanation, reach = self.target.explain(tokens, namespace, searched), self._reach(tokens, namespace)
        both = explanation
        if reach.num_tokens + 1 < len(tokens):
            both = self.target.explain(tokens[: reach.num_tokens + 1], namespace, "none")
        return replace(explanation, num_cached_tokens=both.num_cached_tokens, groups=(*explanation.groups, reach))

    def check(self) -> None:
        """Raise RuntimeError if an invariant of either manager is broken. For tests."""
        self.target.check()
        self.drafts.check()

    # --- inside ---

    def _foresee(self, seq_id: SeqId, places: Ids, name: bytes) -> int:
        """Return how many positions `drafts.allocate` would share now. Raise as it would."""
        drafts, tree = self.drafts, self.drafts.tree
        if seq_id in drafts:
            raise ValueError(f"seq_id must not be in use, {seq_id!r} is")
        num_left_over = 1 if drafts.enable_prefix_caching else len(places)
        match = tree.match(places, name, num_left_over=num_left_over, is_hit=False)
        try:
            if not drafts.space.should_load(match.num_blocks - match.num_device_blocks):
                tree.trim(match)
            num_needed = -(-len(places) // drafts.block_size) - match.num_device_blocks
            part = tree.match_part(match, places) if drafts.share_parts else None
            num_part = 0
            if part is not None:
                num_part = part.num_tokens if num_needed <= drafts.num_free_blocks else 0
                tree.release(part.match)
            drafts.space.check_room(num_needed, 0)
            return match.num_tokens + num_part
        finally:
            tree.release(match)

    def _reach(self, tokens: Ids, namespace: bytes) -> GroupReach:
        """Return how far cached positions reach into a prompt."""
        drafts, (places, name) = self.drafts, positions(tokens, namespace)
        if not drafts.enable_prefix_caching:
            return replace(drafts.explain(places, name).groups[0], group="successor")
        reach = reach_of_attention(drafts.space, places[:-1], name, drafts.share_parts)
        differs_at = None if reach.differs_at is None else reach.differs_at + 1
        return replace(reach, group="successor", differs_at=differs_at)


def _check_room(name: str, manager: BlockManager, seq_id: SeqId, count: int) -> None:
    """Raise ValueError unless the sequence has room for `count` more tokens."""
    state = manager.state(seq_id)
    if count > state.num_tokens - state.num_written:
        raise ValueError(f"{name} must be at most {state.num_tokens - state.num_written}, got {count} for {seq_id!r}")
