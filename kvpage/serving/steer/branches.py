"""Branches: sequences over an engine's model and blocks that their owner steers, token by token.

    start([5, 9]) ─► a ── compute ─► logits after 9
    fork(a) ─► b       a.append(2), b.append(7) ── compute ─► logits after 2, and after 7: 5 and 9 are computed once

They serve beam search, particles, grammars, and other choices of tokens that a request's SamplingParams cannot express.
Requests find the blocks that branches have computed, and the other way round.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.interrupts import uninterrupted
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import as_integer, as_list
from kvpage.serving.model.step import BatchItem
from kvpage.serving.sampling.logits_check import LogitsNotFinite, rows_not_finite
from kvpage.serving.steer.steerable import SteerableEngine

Result = TypeVar("Result")


class Branch:
    """A sequence of tokens. K and V of the first `num_computed` are in blocks. Branches makes it.

    tokens   [ 5  9  2 | 7  1 |  4 ]     4: appended since, has no slot yet
             num_computed  num_room

    Args:
        tokens: Its tokens, int32.
        num_computed: How many of them are computed.
        num_room: For how many of them there are slots.
        namespace: Only sequences of the same namespace share blocks with it.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], num_computed: int, num_room: int, namespace: bytes = b"") -> None:
        self._tokens = tokens  # its first num_tokens; doubled when it grows
        self.num_tokens = len(tokens)
        self.num_computed = num_computed
        self.num_room = num_room
        self.namespace = namespace

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """A view of the tokens, int32 [num_tokens], valid until the next append."""
        return self._tokens[: self.num_tokens]

    def append(self, tokens: Tokens) -> None:
        """Add tokens for the next `compute`. Nothing is allocated yet.

        Args:
            tokens: Token ids.

        Raises:
            TypeError, ValueError: They are no token ids.
        """
        added = as_tokens(tokens)
        end = self.num_tokens + len(added)
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, max(end, 2 * len(self._tokens)))
        self._tokens[self.num_tokens : end] = added
        self.num_tokens = end


class Branches:
    """The branches of one owner over an engine. Not thread-safe; calls come between the engine's steps.

    They come before requests: where blocks are short, running requests are preempted, the youngest first, and go on
    later. Ctrl-C amid a call leaves no block without an owner: `close` ends the branches that the call has made.

    Where the model's layers keep states, or windows have blocks of their own, `fork` takes all tokens of a branch only.
    A `compute` that fails has changed the states of its branches: the next one computes their tokens again, from a
    checkpoint on.

    Args:
        engine: The engine.
        reclaim: Asked first, where blocks are short, for blocks that the owner can do without; False if there are none.
    """

    def __init__(self, engine: SteerableEngine, reclaim: Callable[[], bool] | None = None) -> None:
        self.engine = engine
        self._reclaim = reclaim or (lambda: False)
        self._manager = engine.manager
        self._live: set[Branch] = set()
        self._spoiled: dict[Branch, int] = {}  # they hold nothing; how many tokens they had computed

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, branch: Branch) -> bool:
        """Whether a branch is one of these and has not ended."""
        return branch in self._live

    @uninterrupted
    def start(self, tokens: Tokens, namespace: bytes = b"") -> Branch:
        """Start a branch. Blocks of a cached prefix are reused; the rest is for `compute`.

        Args:
            tokens: Token ids, at least one.
            namespace: Only sequences of the same namespace share blocks.

        Returns:
            The branch.

        Raises:
            ValueError, TypeError: As `Engine.add_request` for tokens and namespace.
            OutOfBlocks: There are too few blocks; nothing is held.
        """
        checked = self.engine.check_tokens(tokens)
        branch = Branch(checked.copy(), 0, 0, self.engine.kv_namespace(namespace))
        self._allocate(branch)
        self._live.add(branch)
        return branch

    @uninterrupted
    def fork(self, branch: Branch, num_tokens: int | None = None) -> Branch:
        """Return another branch with the same tokens, in the same blocks.

        Args:
            branch: All of its tokens are computed.
            num_tokens: Leading tokens to fork, at least `first_forkable`. None means all.

        Returns:
            The new branch.

        Raises:
            ValueError: Not all tokens are computed, or BlockManager.fork does not take num_tokens.
            KeyError: The branch has ended.
        """
        self._check([branch])
        if branch.num_computed != branch.num_tokens:
            raise ValueError(f"fork needs all {branch.num_tokens} tokens to be computed, {branch.num_computed} are")
        num_tokens = branch.num_tokens if num_tokens is None else num_tokens
        fork = Branch(branch.token_ids[:num_tokens].copy(), num_tokens, num_tokens, branch.namespace)
        self._with_room(lambda: self._manager.fork(branch, fork, num_tokens))
        self._live.add(fork)
        return fork

    def first_forkable(self, branch: Branch) -> int:
        """Return the fewest tokens that `fork` takes. For fewer, `start` finds the blocks, which are cached.

        Args:
            branch: A branch that has not ended.

        Returns:
            A number of tokens.
        """
        return self._manager.first_forkable(branch)

    def compute(self, branches: Sequence[Branch], wanted: Sequence[Sequence[int]] | None = None) -> torch.Tensor:
        """Compute the tokens of each branch that are left, in passes of at most max_num_batched_tokens.

        After an exception nothing is lost or cached. The same call may be made again, or one with other branches.

        Args:
            branches: Each is named once, and has at least one token left to compute.
            wanted: For each branch, the numbers of leading tokens after which logits are asked for, ascending, among
                those left to compute. None means after its last token.

        Returns:
            The logits: [len(branches), vocab_size], or [wanted numbers in all, vocab_size].

        Raises:
            ValueError: A branch is named twice, has nothing left, or is longer than the model takes; or `wanted` is out
                of its range.
            KeyError: A branch has ended.
            OutOfBlocks: There are too few blocks.
            LogitsNotFinite: The logits of some branches are no numbers; it names them.
        """
        self._check(branches)
        if not branches:
            raise ValueError("branches must hold at least one, got none")
        self._begin_again(branches)
        self._check_left(branches)
        counts = [[len(branch)] for branch in branches] if wanted is None else _counts(wanted)
        for branch, branch_counts in zip(branches, counts, strict=True):
            first, last = branch.num_computed + 1, len(branch)
            are_inside = all(first <= count <= last for count in branch_counts)
            if branch_counts != sorted(branch_counts) or not are_inside:
                raise ValueError(f"wanted must be ascending, in [{first}, {last}] for this branch, got {branch_counts}")
        self._give_room(branches)
        passes = self._passes(branches, counts)
        try:
            logits = self._compute_passes(branches, passes)
        except BaseException:
            self._spoil(branches)
            raise
        self._commit([item for items in passes for item in items])
        return logits

    @uninterrupted
    def release(self, branches: Iterable[Branch]) -> None:
        """End branches. Their cached blocks can be found until they are evicted.

        Args:
            branches: Each is named once.

        Raises:
            KeyError: One has ended; then none of the others ends.
            ValueError: One is named twice; then none ends.
        """
        branches = as_list("branches", branches)
        self._check(branches)
        for branch in branches:
            self._live.remove(branch)
            if self._spoiled.pop(branch, None) is None:
                self._manager.release(branch)

    @uninterrupted
    def keep_end(self, branch: Branch) -> None:
        """Leave the state after a branch's computed tokens to others. It is to be released next.

        Without states, or after a step that has spoiled this one, nothing happens.

        Args:
            branch: The branch.

        Raises:
            KeyError: It has ended.
        """
        self._check([branch])
        if branch not in self._spoiled:
            self._manager.keep_end(branch)

    def close(self) -> None:
        """End all branches that are left."""
        self.release(list(self._live))

    def __enter__(self) -> "Branches":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.close()
        finally:
            self.close()  # Ctrl-C may have come before its first line

    # --- inside ---

    def _check(self, branches: Sequence[Branch]) -> None:
        if len(set(branches)) != len(branches):
            raise ValueError(f"branches must be distinct, got {len(branches)} of which {len(set(branches))} are")
        for branch in branches:
            if branch not in self._live:
                raise KeyError("branch must be one of these Branches that has not ended")

    def _check_left(self, branches: Sequence[Branch]) -> None:
        for branch in branches:
            if branch.num_tokens > self.engine.max_model_len:
                raise ValueError(
                    f"a branch must fit into max_model_len={self.engine.max_model_len}, got {branch.num_tokens} tokens"
                )
            if branch.num_computed == branch.num_tokens:
                raise ValueError(f"a branch must have tokens left to compute, one of {branch.num_tokens} has none")
            self.engine.check_tokens(branch.token_ids[branch.num_computed :])

    def _allocate(self, branch: Branch, max_cached_tokens: int | None = None) -> None:
        """Give blocks to a branch that has none."""
        allocate = partial(
            self._manager.allocate,
            branch,
            branch.token_ids,
            branch.namespace,
            max_cached_tokens=max_cached_tokens,
        )
        branch.num_computed = self._with_room(allocate).num_cached_tokens
        branch.num_room = branch.num_tokens

    def _with_room(self, call: Callable[[], Result]) -> Result:
        """Return what the call does. Where blocks are short for it, others give some."""
        while True:
            try:
                return call()
            except OutOfBlocks:
                if not (self._reclaim() or self.engine.preempt_or_reclaim()):
                    raise

    @uninterrupted
    def _spoil(self, branches: Iterable[Branch]) -> None:
        """Take the blocks of branches whose states a failed step has changed. They begin again later."""
        if self._manager.states is None:
            return
        for branch in branches:
            self._manager.give_up_marks(branch)
            self._manager.release(branch)
            self._spoiled[branch] = branch.num_computed
            branch.num_computed = branch.num_room = 0

    @uninterrupted
    def _begin_again(self, branches: Iterable[Branch]) -> None:
        """Give blocks to branches that a failed step has spoiled."""
        for branch in branches:
            if branch in self._spoiled:
                self._allocate(branch, self._spoiled[branch])
                del self._spoiled[branch]

    @uninterrupted
    def _give_room(self, branches: Sequence[Branch]) -> None:
        counts = [branch.num_tokens - branch.num_room for branch in branches]
        self._with_room(lambda: self._manager.append(branches, counts))
        ends = [branch.num_tokens for branch in branches]
        self._with_room(lambda: self._manager.windows.open(branches, ends))
        for branch in branches:
            branch.num_room = branch.num_tokens

    def _passes(self, branches: Sequence[Branch], counts: Sequence[Sequence[int]]) -> list[list[BatchItem]]:
        """Return the tokens left of the branches, in order, in passes of at most max_num_batched_tokens."""
        passes: list[list[BatchItem]] = [[]]
        budget = limit = self.engine.config.max_num_batched_tokens
        for branch, branch_counts in zip(branches, counts, strict=True):
            start = branch.num_computed
            while start < branch.num_tokens:
                if budget == 0:
                    passes.append([])
                    budget = limit
                end = min(start + budget, branch.num_tokens)
                wanted_rows = [count - 1 - start for count in branch_counts if start < count <= end]
                passes[-1].append(BatchItem(branch, branch.token_ids[start:end], start, end, wanted_rows))
                budget -= end - start
                start = end
        return passes

    def _compute_passes(self, branches: Sequence[Branch], passes: Sequence[Sequence[BatchItem]]) -> torch.Tensor:
        """Return the wanted logits of all. Raises: LogitsNotFinite."""
        logits, bad = [], set[Hashable]()
        for items in passes:
            rows, owners = self._compute_pass(items)
            logits.append(rows)
            bad |= owners
        if bad:
            places = [index for index, branch in enumerate(branches) if branch in bad]
            raise LogitsNotFinite(places, [f"branch {index}" for index in places])
        return torch.cat(logits)

    def _compute_pass(self, items: Sequence[BatchItem]) -> tuple[torch.Tensor, set[Hashable]]:
        """Return the wanted logits, and the branches with logits that are no numbers, after wanted or last tokens."""
        checked = [_with_last(item) for item in items]
        logits = self.engine.compute(checked)
        owners = [item.seq_id for item in checked for _ in item.wanted]
        bad = {owners[row] for row in rows_not_finite(logits.amax(dim=-1))}
        is_wanted = [
            index < len(item.wanted)
            for item, more in zip(items, checked, strict=True)
            for index in range(len(more.wanted))
        ]
        return logits if all(is_wanted) else logits[torch.tensor(is_wanted, device=logits.device)], bad

    @uninterrupted
    def _commit(self, items: Sequence[BatchItem]) -> None:
        for item in items:
            assert isinstance(item.seq_id, Branch)
            self._manager.commit(item.seq_id, item.token_ids)
            item.seq_id.num_computed = item.end
        for seq_id in {item.seq_id: None for item in items}:
            self._manager.keep(seq_id)


def _with_last(item: BatchItem) -> BatchItem:
    last = item.end - item.start - 1
    return item if last in item.wanted[-1:] else item._replace(wanted=[*item.wanted, last])


def _counts(counts: Sequence[Sequence[int]]) -> list[list[int]]:
    lists = [as_list("wanted", branch_counts) for branch_counts in as_list("wanted", counts)]
    return [[as_integer("wanted", count) for count in branch_counts] for branch_counts in lists]
