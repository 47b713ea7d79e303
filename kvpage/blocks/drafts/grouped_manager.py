"""GroupedManager: a target's blocks and its draft model's, side by side: one call for both where they go together.

    allocate          the target begins at t, the draft model at d >= t: it needs the target's hidden states from d on
    append            room for both
    target.do_moves, drafts.do_moves ─► the target's step ─► the draft model's step
    commit            tokens of the target, successors of the draft model's positions
    release           both

Each of the two has its own pool, tree, block ids and tables: `manager.target` and `manager.drafts`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvpage.blocks.drafts.successor_manager import SuccessorManager
from kvpage.blocks.explain import Explanation
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.states import Allocation, SeqId
from kvpage.checks.interrupts import uninterrupted
from kvpage.checks.tokens import Tokens, as_tokens, some_tokens
from kvpage.checks.values import as_list


class GroupAllocation(NamedTuple):
    """The blocks that a sequence was given in both groups.

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


class GroupedManager:
    """Sequences of a target and of the model that drafts for it.

    As in BlockManager, each method gives all or nothing. Every method raises KeyError for an unknown sequence.
    Other calls for one group, such as tables, slots, moves and statistics, go to that group's manager.

    Args:
        target: The target's manager: a BlockManager, or one with states or windows. The caller's; without sequences.
        drafts: The draft model's. The caller's; without sequences.

    Raises:
        TypeError: An argument is of another type.
    """

    def __init__(self, target: BlockManager, drafts: SuccessorManager) -> None:
        if not isinstance(target, BlockManager) or isinstance(target, SuccessorManager):
            raise TypeError(f"target must be a manager of the target's tokens, got {type(target).__name__}")
        if not isinstance(drafts, SuccessorManager):
            raise TypeError(f"drafts must be a SuccessorManager, got {type(drafts).__name__}")
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
    ) -> GroupAllocation:
        """Give blocks to a new sequence in both groups. It begins at the longest prefix that both have.

        Args:
            seq_id: An id that is not in use.
            tokens: The prompt, at least one token.
            namespace: Prefixes are shared within one namespace only.
            priority: 0 to 7. Blocks cached by a sequence of higher priority are evicted later.
            max_cached_tokens: The longest prefix to share; None for no limit.
            num_left_over: At least that many tokens are left to compute.

        Returns:
            The blocks of both, and where each begins.

        Raises:
            OutOfBlocks: The rest does not fit into one of the groups.
            ValueError: The id is in use, there are no tokens, or a number is out of range.
            TypeError: An argument is of another type.
        """
        self.drafts.check_new(seq_id)
        num_drafted = self.drafts.foresee(tokens, namespace, max_cached_tokens)
        target = self.target.allocate(seq_id, tokens, namespace, priority, num_drafted, num_left_over)
        drafts = self.drafts.allocate(seq_id, tokens, namespace, priority, num_drafted)
        return GroupAllocation(target, drafts)

    @uninterrupted
    def append(self, seq_ids: Sequence[SeqId], num_new_tokens: Sequence[int] | int = 1) -> None:
        """Make room for more tokens in each sequence, in both groups.

        Args:
            seq_ids: Distinct sequences.
            num_new_tokens: One number for each sequence, or one for all.

        Raises:
            OutOfBlocks: The tokens do not fit.
            ValueError: Ids repeat, a number is negative, or there is another number of numbers.
        """
        seq_ids = as_list("seq_ids", seq_ids)
        self.drafts.check_append(seq_ids, num_new_tokens)
        self.target.append(seq_ids, num_new_tokens)
        self.drafts.append(seq_ids, num_new_tokens)

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
        self.drafts.keep_room(seq_id, self.target.state(seq_id).num_written)

    @uninterrupted
    def release(self, seq_id: SeqId) -> None:
        """End a sequence in both groups. Its cached blocks can be found until they are evicted."""
        self.target.release(seq_id)
        self.drafts.release(seq_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks of both groups.

        Raises:
            RuntimeError: A sequence is not released, or a match of a tree. Nothing is forgotten.
        """
        self.target.reset_prefix_cache()
        self.drafts.reset_prefix_cache()

    def explain(self, tokens: Tokens, namespace: bytes = b"") -> Explanation:
        """Return how far each group reaches into a prompt, and why not further. Nothing is changed.

        Args:
            tokens: A prompt.
            namespace: Where to look.
        """
        tokens = some_tokens(tokens)
        explanation, drafted = self.target.explain(tokens, namespace), self.drafts.reach(tokens, namespace)
        both = (
            explanation
            if drafted.num_tokens + 1 >= len(tokens)
            else self.target.explain(tokens[: drafted.num_tokens + 1], namespace)
        )
        return Explanation(len(tokens), both.num_cached_tokens, (*explanation.groups, drafted), explanation.elsewhere)

    def check(self) -> None:
        """Raise RuntimeError if an invariant of either group is broken. For tests."""
        self.target.check()
        self.drafts.check()


def _check_room(name: str, manager: BlockManager, seq_id: SeqId, count: int) -> None:
    """Raise ValueError unless the sequence has room for `count` more tokens."""
    state = manager.state(seq_id)
    if count > state.num_tokens - state.num_written:
        raise ValueError(f"{name} must be at most {state.num_tokens - state.num_written}, got {count} for {seq_id!r}")
