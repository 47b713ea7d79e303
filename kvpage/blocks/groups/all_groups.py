"""AllGroups: the calls of a manager with groups: each is done in its blocks and in all groups, or in none.

prompt ─► match of the tree ─► agree: the position that all groups serve ─► checks ─► blocks ─► begin in each group
                                                                              └─ nothing is changed if one raises
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvpage._C import Match
from kvpage.blocks.explain import Explanation, GroupReach, longest_elsewhere, reach_of_attention
from kvpage.blocks.groups.group import GroupManager, Groups, PathIds, Prompt, agree
from kvpage.blocks.sequence_state import Allocation, Ids, SeqId
from kvpage.blocks.sequences.sequences import Sequences
from kvpage.blocks.sequences.swaps import resume, swap_out
from kvpage.blocks.space import BlockSpace
from kvpage.blocks.stats import Query
from kvpage.checks.interrupts import uninterrupted


class PrefixHit(NamedTuple):
    """The cached beginning of a prompt.

    Attributes:
        match: Its blocks, pinned until the match is released.
        claims: A claim of each group, all at `num_tokens`.
        num_tokens: Tokens that need not be computed again.
        num_refused: Host blocks that are likely computed faster than loaded.
    """

    match: Match
    claims: Sequence[Any]
    num_tokens: int
    num_refused: int


class AllGroups:
    """Sequences in the blocks of `space` and in all `groups`. Each method gives all or nothing, see BlockManager.

    Ctrl-C is raised after a call, which is done then.
    """

    def __init__(
        self, space: BlockSpace, sequences: Sequences, groups: Groups, takes_tails: bool, is_caching: bool
    ) -> None:
        self._space = space
        self._sequences = sequences
        self._groups = groups
        self._takes_tails = takes_tails
        self._is_caching = is_caching

    def position(self, ids: PathIds, prompt: Prompt) -> int:
        """Return the position at which a sequence would begin. Nothing is changed.

        ids: The tree's ids of the prompt's cached blocks.
        """
        return int(self._agreed(ids, prompt)[0][0].num_tokens)

    def explain(self, tokens: Ids, namespace: bytes) -> Explanation:
        """Return how far each group reaches into a prompt. Beside states, which stand amid blocks, a part counts."""
        tree, prompt = self._space.tree, Prompt(tokens, namespace, 0, 1)
        ids = tree.look(tokens, namespace)[0]
        attention = reach_of_attention(tree, tokens, namespace, self._takes_tails, self._space.rule)
        position, reaches = self.position(ids, prompt), list[GroupReach]()
        for group in reversed(self._groups):  # states first: windows reach into their tails, too
            reaches.insert(0, group.explain(ids, prompt, attention))
            attention = group.amend(attention, ids, prompt, position)
        elsewhere = longest_elsewhere(tree, tokens, namespace, attention.num_tokens)
        return Explanation(len(tokens), position, (attention, *reaches), elsewhere)

    @uninterrupted
    def begin(self, seq_id: SeqId, prompt: Prompt) -> Allocation:
        """Give blocks, and room in all groups, to a sequence: a new one, or one that is swapped out.

        Raises:
            OutOfBlocks: The prompt does not fit into a group. Nothing is changed.
        """
        return self._begin(seq_id, prompt, self._hit(prompt, self._match(prompt)))

    @uninterrupted
    def swap_in(self, seq_id: SeqId, prompt: Prompt) -> Allocation:
        """Bring a sequence back with all that was committed, or begin it again where something of that is gone.

        Raises:
            OutOfBlocks: A group lacks room on the device. Nothing is changed.
        """
        swapped, match = self._sequences.swapped[seq_id], self._match(prompt)
        try:
            ids = match.tier_block_ids()[:, : swapped.first_block]
            if ids.shape[1] == swapped.first_block and all(group.can_return(seq_id, ids) for group in self._groups):
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
        swap_out(self._space, self._sequences, seq_id)
        for group in self._groups:
            group.swap_out(seq_id)

    @uninterrupted
    def commit(self, seq_id: SeqId, tokens: Ids) -> None:
        """Commit tokens, and have the groups follow."""
        row = self._sequences.on_device[seq_id]
        for group in self._groups:
            group.check_commit(seq_id, len(tokens))
        notes = [group.committing(seq_id, tokens) for group in self._groups]
        self._sequences.commit(self._space, row, tokens)
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
        row = self._sequences.on_device[seq_id]
        for group in self._groups:
            group.check_settled(seq_id)
        self._sequences.rows.give_back_room(row)
        for group in self._groups:
            group.shorten(seq_id)

    @uninterrupted
    def release(self, seq_id: SeqId) -> None:
        """End a sequence, also one that is swapped out."""
        if seq_id not in self._sequences.swapped:
            self._sequences.on_device[seq_id]  # KeyError
        for group in self._groups:
            group.release(seq_id)
        self._sequences.end(self._space, seq_id)

    @uninterrupted
    def each(self, seq_id: SeqId, call: Callable[[GroupManager[Any]], bool | None]) -> bool:
        """Make a call of each group, for a sequence on the device; return whether one has returned True."""
        self._sequences.on_device[seq_id]  # KeyError
        return any([call(group) for group in self._groups])

    # --- inside ---

    def _match(self, prompt: Prompt) -> Match:
        return self._space.tree.match(
            prompt.tokens, prompt.namespace, prompt.priority, prompt.num_left_over, is_hit=False
        )

    def _hit(self, prompt: Prompt, match: Match) -> PrefixHit:
        """Return the hit of a match, which is shortened to it, or released if this raises."""
        try:
            claims, num_refused = self._agreed(match.tier_block_ids(), prompt)
            claims = [
                group.look_beyond(match, prompt, claim) for group, claim in zip(self._groups, claims, strict=True)
            ]
            num_tokens = claims[0].num_tokens
            self._space.tree.shorten(match, num_tokens // self._space.block_size)
        except BaseException:
            self._space.tree.release(match)
            raise
        return PrefixHit(match, claims, num_tokens, num_refused)

    def _agreed(self, ids: PathIds, prompt: Prompt) -> tuple[list[Any], int]:
        """Return the groups' claims, and how many host blocks were left out since they are not worth their way back."""
        size, num_on_device = self._space.block_size, int((ids[0] >= 0).sum())
        most = prompt.most if self._takes_tails else min(ids.shape[1], prompt.most // size) * size
        claims = agree(self._groups, ids, prompt, most)
        num_host = claims[0].num_tokens // size - num_on_device
        if num_host <= 0 or self._space.should_load(num_host):
            return claims, 0
        last = size - 1 if self._takes_tails else 0
        return agree(self._groups, ids, prompt, min(most, num_on_device * size + last)), num_host

    def _begin(self, seq_id: SeqId, prompt: Prompt, hit: PrefixHit) -> Allocation:
        size, num_blocks, num_matched = self._space.block_size, hit.match.num_blocks, hit.match.num_tokens
        num_tail, num_host = hit.num_tokens - num_matched, num_blocks - hit.match.num_device_blocks
        try:
            for group, claim in zip(self._groups, hit.claims, strict=True):
                group.check_begin(hit.match.tier_block_ids(), claim)
            block_ids = self._sequences.resume(
                self._space,
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
        ids = self._sequences.path(seq_id)
        for group, claim in zip(self._groups, hit.claims, strict=True):
            group.begin(seq_id, prompt, ids, claim, block_ids[num_blocks:])
        if seq_id in self._sequences.swapped:
            self._sequences.forget_swapped(self._space, seq_id)
        if prompt.is_counted:
            query = Query(len(prompt.tokens), num_tail, hit.num_refused)
            self._space.count(query, num_matched - num_host * size, num_host * size)
        return Allocation(hit.num_tokens, block_ids)

    def _return(self, seq_id: SeqId, prompt: Prompt, match: Match) -> Allocation:
        """Bring back all that was committed."""
        self._space.tree.shorten(match, self._sequences.swapped[seq_id].first_block)
        for group in self._groups:
            group.check_return(seq_id, match.tier_block_ids())
        num_written = resume(
            self._space, self._sequences, seq_id, prompt.tokens, match, self._is_caching, prompt.num_spare
        )
        for group in self._groups:
            group.return_to_device(seq_id, self._sequences.path(seq_id))
        self._sequences.forget_swapped(self._space, seq_id)
        return Allocation(num_written, self._sequences.ids(seq_id))
