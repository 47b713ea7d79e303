"""AllGroups: the calls for the blocks of a manager and all of its groups: each is done in all of them, or in none.

Without groups, `Sequences` does the most frequent of them itself.

prompt ─► match of the tree ─► agree: the position that all groups serve ─► checks ─► blocks ─► begin in each group
                                                                              └─ nothing is changed if one raises
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvpage._C import Match
from kvpage.blocks.explain import Explanation, GroupReach, Searched, longest_elsewhere, reach_of_attention
from kvpage.blocks.groups.group import Agreement, GroupManager, Groups, Prompt, agree
from kvpage.blocks.sequence_state import Allocation, Ids, PathIds, SeqId
from kvpage.blocks.sequences.sequences import Sequences
from kvpage.blocks.stats import Query
from kvpage.checks.interrupts import HeldInterrupts, uninterrupted


class PrefixHit(NamedTuple):
    """The cached beginning of a prompt.

    Attributes:
        match: Its blocks, pinned until the match is released.
        ids: The tree's ids of these blocks.
        num_tokens: Tokens that need not be computed again.
        claims: A claim of each group, all at `num_tokens`.
        num_refused: Host blocks that are likely computed faster than loaded.
    """

    match: Match
    ids: PathIds
    num_tokens: int
    claims: Sequence[Any]
    num_refused: int


class AllGroups:
    """Sequences in their blocks and in all `groups`, of which there may be none. Each method gives all or nothing.

    Ctrl-C is raised after a call, which is done then.
    """

    def __init__(self, sequences: Sequences, groups: Groups, takes_tails: bool) -> None:
        self._space = sequences.space
        self._sequences = sequences
        self._groups = groups
        self._takes_tails = takes_tails

    def position(self, ids: PathIds, prompt: Prompt) -> int:
        """Return the position at which a sequence would begin. Nothing is changed.

        ids: The tree's ids of the prompt's cached blocks.
        """
        return self._agreed(ids, prompt)[0].num_tokens

    def explain(self, tokens: Ids, namespace: bytes, searched: Searched) -> Explanation:
        """Return how far each group reaches into a prompt. Beside states, which stand amid blocks, a part counts."""
        tree, prompt = self._space.tree, Prompt(tokens, namespace, 0, 1)
        ids = tree.look(tokens, namespace)[0]
        attention = reach_of_attention(self._space, tokens, namespace, self._takes_tails)
        position, reaches = self.position(ids, prompt), list[GroupReach]()
        for group in reversed(self._groups):  # states first: windows reach into their tails, too
            reaches.insert(0, group.explain(ids, prompt, attention))
            attention = group.amend(attention, ids, prompt, position)
        elsewhere, version = longest_elsewhere(tree, tokens, namespace, attention.num_tokens, searched)
        return Explanation(len(tokens), position, (attention, *reaches), elsewhere, version=version)

    @uninterrupted
    def begin(self, seq_id: SeqId, prompt: Prompt) -> Allocation:
        """Give blocks, and room in all groups, to a new sequence.

        Raises:
            OutOfBlocks: The prompt does not fit into a group. Nothing is changed.
        """
        return self._begin(seq_id, prompt, self._hit(prompt, self._match(prompt)))

    @uninterrupted
    def swap_in(self, seq_id: SeqId, tokens: Ids, num_spare: int) -> Allocation:
        """Bring a sequence back with all that was committed.

        It is begun again where something of that is gone, or is expected to be computed faster than loaded.

        Raises:
            OutOfBlocks: A group lacks room on the device. Nothing is changed.
        """
        swapped = self._sequences.swapped[seq_id]
        # What a group moves stands for the committed tokens: none that others have cached after them is looked for.
        most = self._sequences.most_found(seq_id, swapped.num_written if self._groups else len(tokens))
        num_left_over = len(tokens) - most
        prompt = Prompt(
            tokens, swapped.namespace, swapped.priority, num_left_over, swapped.is_private, num_spare=num_spare
        )
        match = self._match(prompt)
        try:
            if self._should_return(seq_id, prompt, match):
                return self._return(seq_id, prompt, match)
            hit = self._hit(prompt, match)
        except BaseException:
            if not match.is_released:
                self._space.tree.release(match)
            raise
        return self._begin(seq_id, prompt, hit)

    @uninterrupted
    def swap_out(self, seq_id: SeqId) -> None:
        """Free what a sequence has on the device."""
        self._sequences.on_device[seq_id]  # KeyError
        for group in self._groups:
            group.check_settled(seq_id)
            group.check_swap_out(seq_id)
        for group in self._groups:
            group.move_on(seq_id)
        self._sequences.swap_out(seq_id)
        for group in self._groups:
            group.swap_out(seq_id)

    @uninterrupted
    def commit(self, seq_id: SeqId, tokens: Ids) -> None:
        """Commit tokens, and have the groups follow."""
        self._sequences.on_device[seq_id]  # KeyError
        for group in self._groups:
            group.check_commit(seq_id, len(tokens))
        notes = [group.committing(seq_id, tokens) for group in self._groups]
        self._sequences.commit(seq_id, tokens)
        # States come first: a checkpoint takes its tail out of blocks that windows give back next.
        for group, note in zip(reversed(self._groups), reversed(notes), strict=True):
            group.committed(seq_id, note)

    @uninterrupted
    def fork(self, seq_id: SeqId, new_seq_id: SeqId, num_tokens: int) -> None:
        """Begin a sequence with the first tokens of another."""
        for group in self._groups:
            group.check_fork(seq_id)
        self._sequences.fork(seq_id, new_seq_id, num_tokens)
        for group in self._groups:
            group.fork(seq_id, new_seq_id, num_tokens)

    @uninterrupted
    def give_back_room(self, seq_id: SeqId) -> None:
        """Free room beyond the committed tokens."""
        self._sequences.on_device[seq_id]  # KeyError
        for group in self._groups:
            group.check_settled(seq_id)
        self._sequences.give_back_room(seq_id)
        for group in self._groups:
            group.shorten(seq_id)

    @uninterrupted
    def release(self, seq_id: SeqId) -> None:
        """End a sequence, also one that is swapped out."""
        if seq_id not in self._sequences.swapped:
            self._sequences.on_device[seq_id]  # KeyError
        for group in self._groups:
            group.release(seq_id)
        self._sequences.release(seq_id)

    def each(self, seq_id: SeqId, call: Callable[[GroupManager[Any]], bool | None]) -> bool:
        """Make a call of each group, for a sequence on the device; return whether one has returned True."""
        self._sequences.on_device[seq_id]  # KeyError
        if not self._groups:
            return False
        with HeldInterrupts():
            return any([call(group) for group in self._groups])

    # --- inside ---

    def _match(self, prompt: Prompt) -> Match:
        return self._space.tree.match(
            prompt.tokens, prompt.namespace, prompt.priority, prompt.num_left_over, is_hit=False
        )

    def _hit(self, prompt: Prompt, match: Match) -> PrefixHit:
        """Return the hit of a match, which is shortened to it, or released if this raises."""
        try:
            ids = match.tier_block_ids()
            (num_tokens, claims), num_refused = self._agreed(ids, prompt)
            claims = [
                group.look_beyond(match, prompt, claim) for group, claim in zip(self._groups, claims, strict=True)
            ]
            num_blocks = num_tokens // self._space.block_size
            self._space.tree.shorten(match, num_blocks)
        except BaseException:
            self._space.tree.release(match)
            raise
        return PrefixHit(match, ids[:, :num_blocks], num_tokens, claims, num_refused)

    def _agreed(self, ids: PathIds, prompt: Prompt) -> tuple[Agreement, int]:
        """Return where a prompt begins, and how many host blocks were left out since they are not worth loading."""
        longest = self._agreed_within(ids, prompt, ids.shape[1])
        if self._space.rule is None:
            return longest, 0
        num_on_device = _num_on_device(ids)
        num_host = longest.num_tokens // self._space.block_size - num_on_device
        nearest = self._agreed_within(ids, prompt, num_on_device) if num_host > 0 else longest
        if self._space.should_load(num_host, longest.num_tokens - nearest.num_tokens):
            return longest, 0
        return nearest, num_host

    def _agreed_within(self, ids: PathIds, prompt: Prompt, num_blocks: int) -> Agreement:
        """Return where a prompt can begin with the first `num_blocks` cached blocks."""
        size = self._space.block_size
        if self._takes_tails:
            return agree(self._groups, ids, prompt, min(prompt.most, num_blocks * size + size - 1))
        return agree(self._groups, ids, prompt, min(prompt.most // size, num_blocks) * size)

    def _should_return(self, seq_id: SeqId, prompt: Prompt, match: Match) -> bool:
        """Return whether all that a sequence had is there, and worth its way back."""
        own_ids = self._sequences.own_host_ids(seq_id, match.num_blocks)
        if own_ids is None:
            return False
        if not self._groups and self._space.rule is None:
            return True
        ids = match.tier_block_ids()
        if not all(group.can_return(seq_id, ids) for group in self._groups):
            return False
        if self._space.rule is None:
            return True
        num_on_device, num_written = _num_on_device(ids), self._sequences.swapped[seq_id].num_written
        num_saved = num_written - self._agreed_within(ids, prompt, num_on_device).num_tokens
        return self._space.should_load(ids.shape[1] - num_on_device + len(own_ids), num_saved)

    def _begin(self, seq_id: SeqId, prompt: Prompt, hit: PrefixHit) -> Allocation:
        size, num_blocks = self._space.block_size, hit.ids.shape[1]
        has_host_tier = self._space.has_host_tier
        num_host = num_blocks - _num_on_device(hit.ids) if has_host_tier else 0
        num_matched = num_blocks * size
        try:
            for group, claim in zip(self._groups, hit.claims, strict=True):
                group.check_begin(hit.ids, claim)
            block_ids = self._sequences.resume(
                seq_id,
                hit.match,
                num_tokens=len(prompt.tokens),
                num_written=hit.num_tokens,
                pending=prompt.tokens[num_matched : num_matched if prompt.is_private else hit.num_tokens],
                namespace=prompt.namespace,
                num_spare=prompt.num_spare,
                is_private=prompt.is_private,
                is_hit=prompt.is_counted,
            )
        except BaseException:
            if not hit.match.is_released:
                self._space.tree.release(hit.match)
            raise
        # With a host tier, blocks have come back, and copies of others may be gone.
        ids = self._sequences.path(seq_id) if has_host_tier else hit.ids
        for group, claim in zip(self._groups, hit.claims, strict=True):
            group.begin(seq_id, prompt, ids, claim, block_ids[num_blocks:])
        if seq_id in self._sequences.swapped:
            self._sequences.forget_swapped(seq_id)
        if prompt.is_counted:
            query = Query(len(prompt.tokens), hit.num_tokens - num_matched, hit.num_refused)
            self._space.count(query, num_matched - num_host * size, num_host * size)
        return Allocation(hit.num_tokens, block_ids)

    def _return(self, seq_id: SeqId, prompt: Prompt, match: Match) -> Allocation:
        """Bring back all that was committed."""
        for group in self._groups:
            group.check_return(seq_id, match.tier_block_ids())
        allocation = self._sequences.swap_in(seq_id, prompt.tokens, match, prompt.num_spare)
        for group in self._groups:
            group.return_to_device(seq_id, self._sequences.path(seq_id))
        self._sequences.forget_swapped(seq_id)
        return allocation


def _num_on_device(ids: PathIds) -> int:
    """Return how many blocks of a path are on the device: the first ones."""
    return int((ids[0] >= 0).sum())
