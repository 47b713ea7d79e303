"""GroupManager: what sequences hold in one group of layers, beside the blocks of the layers that attend to all tokens.

    tokens     [ . . . . | . . . . | . . . . | . . ]
    full         17        4         9         30        BlockManager itself: a block of each place
    window        .        .         2         5         a group: the blocks of the last window
    state                                      slot 3    a group: one slot, after all of the tokens

A sequence begins at the largest position that every group serves: `agree` asks the groups in turn, downwards.

    claim ─► check_begin ─► begin ─► committing ─► committed ─► ... ─► release
                                     fork, shorten, swap_out ─► can_return, check_return ─► return_to_device

A call whose name has `check` raises where the group lacks room or refuses the call, and changes nothing. BlockManager
makes all checks of all groups first. The calls after them do not fail, so a call is done in all groups or in none.

What a group caches beside a block of the tree, it keeps by the block's companion, a number that the tree gives. It is
found with the block, in either tier, and `blocks_gone` says when it is not any more.

A new kind of group is a subclass in one file, with its options beside it: see docs/architecture.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from kvpage._C import Match
from kvpage.blocks.explain import GroupReach
from kvpage.blocks.sequence_state import Ids, PathIds, SeqId


class Prompt(NamedTuple):
    """The tokens that a sequence begins with, and how.

    Attributes:
        tokens: All of them, int32.
        namespace: Where to search.
        priority: 0 to 7.
        num_left_over: At least that many tokens are left to compute.
        is_private: Whether no other sequence finds its blocks.
        num_spare: Blocks that are to be left, free or evictable.
        is_counted: Whether the prompt counts in the statistics.
        num_to_compute: Tokens at the end that are computed in any case. The next request begins before them at best.
        cache_at: Positions that the caller has named, at which a group may keep what others can go on from.
    """

    tokens: Ids
    namespace: bytes
    priority: int
    num_left_over: int
    is_private: bool = False
    num_spare: int = 0
    is_counted: bool = False
    num_to_compute: int = 1
    cache_at: Sequence[int] = ()

    @property
    def most(self) -> int:
        """The longest prefix to find, in tokens."""
        return max(len(self.tokens) - self.num_left_over, 0)


@dataclass(frozen=True, slots=True)
class Claim:
    """A position that a group serves. Groups add their own knowledge of it.

    Attributes:
        num_tokens: The position: a sequence can go on after that many tokens.
    """

    num_tokens: int


C = TypeVar("C", bound=Claim)


class GroupManager(ABC, Generic[C]):
    """What the sequences of one manager hold in one group. Not thread-safe.

    Sequences are known by the manager's ids. The defaults are for a group that has nothing to do.
    """

    # --- beginning ---

    @abstractmethod
    def claim(self, ids: PathIds, prompt: Prompt, most: int) -> C:
        """Return the largest position, `most` at most, that the group serves. 0 always is one.

        Args:
            ids: The tree's ids of the prompt's cached blocks.
            prompt: The prompt.
            most: Tokens.
        """

    def look_beyond(self, match: Match, prompt: Prompt, claim: C) -> C:
        """Return the claim with what the whole match tells, before it is shortened to the claim's blocks."""
        return claim

    @abstractmethod
    def check_begin(self, ids: PathIds, claim: C) -> None:
        """Raise OutOfBlocks unless there is room to begin at a claim. ids: The blocks before it."""

    @abstractmethod
    def begin(self, seq_id: SeqId, prompt: Prompt, ids: PathIds, claim: C, own_ids: Ids) -> None:
        """Begin a sequence at a claim, or one again that is swapped out.

        own_ids: The manager's blocks after the blocks of `ids`.
        """

    # --- while it runs ---

    def check_commit(self, seq_id: SeqId, num_tokens: int) -> None:
        """Raise ValueError where the group has no room for that many more tokens."""

    def committing(self, seq_id: SeqId, tokens: Ids) -> object:
        """Return what `committed` is to know of the tokens that are committed next."""
        return None

    def committed(self, seq_id: SeqId, note: Any) -> None:
        """Follow the tokens that have just been committed. note: What `committing` has returned."""

    def keep(self, seq_id: SeqId) -> None:
        """Let others find what a step has left at marked positions, once its tokens are committed."""

    def mark(self, seq_id: SeqId, num_tokens: int) -> None:
        """Mark a position that the sequence will pass, where another parts from it."""

    def keep_end(self, seq_id: SeqId, goes_on: bool) -> bool:
        """Let others go on after the sequence's committed tokens; return whether they can. It ends next."""
        return False

    def give_up_marks(self, seq_id: SeqId) -> None:
        """Forget what a failed step may have spoiled. The sequence ends next."""

    def first_forkable(self, seq_id: SeqId, num_tokens: int) -> int:
        """Return the fewest tokens of all `num_tokens` that a fork can begin with."""
        return 1

    def check_fork(self, seq_id: SeqId) -> None:
        """Raise OutOfBlocks or ValueError where `fork` cannot be done."""

    @abstractmethod
    def fork(self, seq_id: SeqId, new_seq_id: SeqId, num_tokens: int) -> None:
        """Begin a sequence with the first tokens of another, all of which are committed.

        num_tokens: At least `first_forkable` says.
        """

    def check_settled(self, seq_id: SeqId) -> None:
        """Raise ValueError for a sequence amid a load, which can be neither shortened nor swapped out."""

    def shorten(self, seq_id: SeqId) -> None:
        """Give back room beyond the committed tokens."""

    @abstractmethod
    def release(self, seq_id: SeqId) -> None:
        """End a sequence, on the device or swapped out."""

    # --- off the device and back ---

    def check_swap_out(self, seq_id: SeqId) -> None:
        """Raise OutOfBlocks or ValueError where `swap_out` cannot be done."""

    def move_on(self, seq_id: SeqId) -> None:
        """Follow the committed tokens, since rows commit tokens without a word to the groups."""

    @abstractmethod
    def swap_out(self, seq_id: SeqId) -> None:
        """Free what the sequence holds on the device. The manager's blocks are swapped out already."""

    @abstractmethod
    def can_return(self, seq_id: SeqId, ids: PathIds) -> bool:
        """Return whether all that the sequence had is still there. ids: Its cached blocks."""

    @abstractmethod
    def check_return(self, seq_id: SeqId, ids: PathIds) -> None:
        """Raise OutOfBlocks unless the device has room for all that the sequence had."""

    @abstractmethod
    def return_to_device(self, seq_id: SeqId, ids: PathIds) -> None:
        """Bring back all that the sequence had. The manager's blocks come back next."""

    # --- the tree's blocks ---

    @abstractmethod
    def blocks_gone(self, companions: Sequence[int]) -> None:
        """Forget what is kept under the companions of blocks that are forgotten. It may be told twice."""

    def blocks_dropped(self, tokens: Ids, namespace: bytes) -> None:
        """Learn that a user has just dropped the blocks of tokens, where nothing else shares them."""

    def blocks_cleared(self) -> None:
        """Forget all that is cached: the tree's blocks are dropped next."""

    # --- questions ---

    @abstractmethod
    def explain(self, ids: PathIds, prompt: Prompt, attention: GroupReach) -> GroupReach:
        """Return how far the group reaches into a prompt. attention: How far the tree's blocks do."""

    def amend(self, attention: GroupReach, ids: PathIds, prompt: Prompt, begins_at: int) -> GroupReach:
        """Return how far K and V reach, those that the group keeps itself included."""
        return attention

    @abstractmethod
    def check(self, on_device: Sequence[SeqId], swapped: Sequence[SeqId]) -> None:
        """Raise RuntimeError where an invariant is broken. on_device, swapped: The manager's sequences. For tests."""


Groups = Sequence[GroupManager[Any]]


class Agreement(NamedTuple):
    """A position that all groups serve.

    Attributes:
        num_tokens: The position.
        claims: A claim of each group, all there.
    """

    num_tokens: int
    claims: list[Any]


def agree(groups: Groups, ids: PathIds, prompt: Prompt, most: int) -> Agreement:
    """Return the largest position, `most` at most, that every group serves.

    Each round asks the groups that have claimed more than the least. Positions only fall, so it ends, at 0 at last.
    """
    claims = [group.claim(ids, prompt, most) for group in groups]
    if len(claims) == 1:
        return Agreement(claims[0].num_tokens, claims)
    least = min([most, *(claim.num_tokens for claim in claims)])
    while any(claim.num_tokens > least for claim in claims):
        claims = [
            claim if claim.num_tokens == least else group.claim(ids, prompt, least)
            for group, claim in zip(groups, claims, strict=True)
        ]
        least = min(claim.num_tokens for claim in claims)
    return Agreement(least, claims)
