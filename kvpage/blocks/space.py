"""BlockSpace: the blocks of both tiers, free and cached, and the moves between them. It knows no sequences.

free blocks ◄── evict ◄── cached, unpinned ──► demote ──► host blocks ──► evicted there, too

Sequences get their blocks by native calls, which add their moves to the same list: see sequences/growth.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from kvpage._C import BlockPool, Match, PrefixTree
from kvpage.blocks.config import BlockConfig, HostPolicy
from kvpage.blocks.load_or_compute import MOST_BLOCKS, LoadOrCompute
from kvpage.blocks.moves import BlockMove, BlockMoves, Kind
from kvpage.blocks.pins import PinTerms, UserPins
from kvpage.blocks.sequence_state import Ids
from kvpage.blocks.stats import PromptCounts, Query, SpaceStats
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import check_at_least


class SpaceWatcher(Protocol):
    """What is told of cached blocks that are gone."""

    def blocks_gone(self, companions: Sequence[int]) -> None:
        """The blocks with these companions are forgotten, in both tiers. It may be told twice."""

    def blocks_dropped(self, tokens: Ids, namespace: bytes) -> None:
        """A user has just dropped the blocks of tokens, where nothing else shares them."""

    def blocks_cleared(self) -> None:
        """All cached blocks are dropped next."""


class BlockSpace:
    """The pools and the prefix tree of both tiers. Each method gives all or nothing. Not thread-safe."""

    def __init__(self, config: BlockConfig, rule: LoadOrCompute | None = None) -> None:
        self.pool = BlockPool(config.num_blocks)
        self.host_pool = BlockPool(config.num_host_blocks)
        self.has_host_tier = config.num_host_blocks > 0
        host_pool = self.host_pool if self.has_host_tier else None
        self.tree = PrefixTree(self.pool, config.block_size, host_pool, eviction=config.eviction)
        self.block_size = config.block_size
        self.host_policy = config.host_policy or HostPolicy()
        self.rule = rule
        self.pins = UserPins(self.tree, config.pin_quota)
        self._moves = BlockMoves()
        self._watchers: Sequence[SpaceWatcher] = ()
        self._counts = PromptCounts()

    def watch(self, watchers: Sequence[SpaceWatcher]) -> None:
        """Tell watchers of cached blocks that are gone."""
        self._watchers = watchers

    # --- companions ---

    @property
    def most_companions(self) -> int:
        """Companions are less than this number."""
        return self.pool.num_blocks + self.host_pool.num_blocks

    def give_companions(self, match: Match, start: int, end: int) -> None:
        """Give companions to the path's blocks in [start, end); see PrefixTree."""
        self.bury_companions()
        self.tree.give_companions(match, start, end)

    def bury_companions(self) -> None:
        """Tell the watchers whose blocks are gone. Only then others can have their companions."""
        dead = self.tree.dead_companions()
        if not dead:
            return
        for watcher in self._watchers:
            watcher.blocks_gone(dead)
        self.tree.free_companions(len(dead))

    # --- moves ---

    @property
    def has_moves(self) -> bool:
        """Whether there are moves to make."""
        return bool(self._moves)

    def take_moves(self) -> BlockMoves:
        """Hand over the moves, each once."""
        moves, self._moves = self._moves, BlockMoves()
        return moves

    def due_moves(self) -> Iterator[BlockMove]:
        """Return the moves in order; see BlockMoves.due."""
        return self._moves.due()

    def do_moves(self, do_move: Callable[[BlockMove], object]) -> None:
        """Make all moves in order, each by `do_move`; see BlockMoves.do."""
        self._moves.do(do_move)

    def add_move(self, kind: Kind, pairs: Iterable[tuple[int, int]]) -> None:
        """Add a move of independent pairs (from, to)."""
        self._moves.add(kind, pairs)

    @property
    def native(self) -> tuple[list[list[Any]], tuple[bool, int, int] | None]:
        """The last arguments of a native call that gives blocks: the list for its moves, and how it uses the host."""
        if not self.has_host_tier:
            return self._moves.added, None
        fewest = 0 if self.rule is None else self.rule.fewest_to_load
        return self._moves.added, (
            self._keeps_evicted,
            MOST_BLOCKS if fewest is None else fewest,
            self.host_policy.after_hits or 0,
        )

    # --- blocks ---

    @property
    def num_free(self) -> int:
        """Number of device blocks that can be handed out: free ones, and cached ones that are not in use."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_promoted_blocks(self) -> int:
        """Number of blocks that came back from the host, so far."""
        _, _, _, num_promoted, _ = self.tree.counts
        return num_promoted

    def take(self, num_blocks: int, num_spare: int = 0) -> Ids:
        """Take free device blocks. Where too few are free, cached blocks are evicted, and pins end if that helps.

        num_spare: So many more are to be left that are free, or can be evicted.

        Raises:
            OutOfBlocks: There is no room. Nothing is evicted, and no pin ends except those whose time was over.
        """
        self.check_room(num_blocks, num_spare)
        lacking = num_blocks - self.pool.num_free
        if lacking > 0:
            self._evict(lacking)
        return self.pool.allocate(num_blocks)

    def check_room(self, num_blocks: int, num_spare: int) -> None:
        """Raise OutOfBlocks where `take` would. Pins end if that helps."""
        check_at_least("num_spare", num_spare, 0)
        num_needed = num_blocks + num_spare
        if num_needed > self.num_free:
            self.pins.expire()
        if num_needed > self.num_free:
            self.pins.give_up(num_needed - self.num_free)
        if num_needed > self.num_free:
            raise OutOfBlocks(num_needed, self.num_free)

    def take_host(self, num_blocks: int) -> Ids:
        """Take free host blocks. Cached blocks are evicted there where too few are free.

        Raises:
            OutOfBlocks: There is no room. Nothing is evicted.
        """
        lacking = num_blocks - self.host_pool.num_free
        if lacking > self.tree.num_host_evictable:
            raise OutOfBlocks(num_blocks, self.host_pool.num_free + self.tree.num_host_evictable)
        if lacking > 0:
            self.tree.evict_host(lacking)
        return self.host_pool.allocate(num_blocks)

    def release_host(self, host_ids: Ids) -> None:
        """Free host blocks."""
        self.host_pool.release(host_ids)

    def should_load(self, num_host: int, num_tokens: int | None = None) -> bool:
        """Return whether host blocks are worth their way back. num_tokens: that this saves; None for theirs."""
        return num_host <= 0 or self.rule is None or self.rule.should_load(num_host, num_tokens)

    @property
    def writes_at_once(self) -> bool:
        """Whether a block is copied to the host as soon as it is cached."""
        return self.host_policy.after_hits == 0

    def write_out(self, match: Match) -> None:
        """Write the match's blocks to the host: the end of its path has just been cached."""
        if self._keeps_evicted:
            self._moves.add_from("swap_out", lambda: self.tree.write_out(match))

    # --- hints and pins ---

    def pin(
        self,
        tokens: Tokens,
        namespace: bytes = b"",
        ttl: float | None = None,
        *,
        terms: PinTerms | None = None,
        in_place_of: int | None = None,
    ) -> int:
        """Keep the cached prefix of `tokens`, in either tier.

        Requests come first. Where one fits only without pins, pins end: of the lowest priority, the oldest first. So no
        request waits for ever.

        Args:
            tokens: Token ids of a prompt.
            namespace: Where to search.
            ttl: Seconds until the pin ends; None: until `unpin`.
            terms: All terms, in place of `ttl`.
            in_place_of: The handle of a pin that ends with this, and does not count in the quotas; None for none.

        Returns:
            A handle for `unpin`.

        Raises:
            QuotaExceeded: All pins together, or those of one owner, would exceed a quota; a ValueError. Nothing has
                changed.
            ValueError: ttl is not positive.
            TypeError: An argument is of another type.
        """
        terms = PinTerms(ttl) if terms is None else terms
        match = self._match_all(tokens, namespace)
        try:
            return self.pins.add(match, terms, in_place_of)
        except BaseException:
            self.tree.release(match)
            raise

    def unpin(self, handle: int) -> None:
        """End a pin. A pin that has ended already is no error.

        Raises:
            KeyError: The handle was never given.
        """
        self.pins.remove(handle)

    def send_out(self, handle: int) -> int:
        """Have the device blocks that this pin alone holds leave for the host, where that is worth their way back.

        From the prefix's end back to the first block that something else needs there, as far as the host has room. The
        pin goes on.

        Args:
            handle: Of a pin.

        Returns:
            How many device blocks are free by that.
        """
        match = self.pins.match_of(handle)
        return 0 if match is None else self._send_out(match)

    def demote(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Have the device blocks of a cached prefix leave for the host as by `send_out`, without a pin.

        Args:
            tokens: Token ids of a prompt.
            namespace: Where to search.

        Returns:
            How many device blocks are free by that.
        """
        match = self._match_all(tokens, namespace)
        try:
            return self._send_out(match)
        finally:
            self.tree.release(match)

    def prefetch(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Bring the host blocks of the tokens' prefix to the device, if there is room.

        Args:
            tokens: Token ids of a prompt.
            namespace: Where to search.

        Returns:
            The number of tokens in these blocks.
        """
        match = self._match_all(tokens, namespace)
        try:
            num_host = match.num_blocks - match.num_device_blocks
            if num_host == 0 or num_host > self.num_free:
                return 0
            self._promote(match, self.take(num_host))
            return num_host * self.block_size
        finally:
            self.tree.release(match)

    def drop(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Forget the blocks of `tokens` that are not in use and that no other cached prompt shares.

        Args:
            tokens: Token ids of a prompt.
            namespace: Where to search.

        Returns:
            The number of tokens in these blocks.
        """
        tokens = as_tokens(tokens)
        num_dropped = self.tree.drop(tokens, namespace)
        for watcher in self._watchers:
            watcher.blocks_dropped(tokens, namespace)
        return num_dropped

    def touch(self, tokens: Tokens, namespace: bytes = b"") -> None:
        """Note a use of the cached prefix of `tokens`, which is no hit: its blocks are evicted after others again.

        Args:
            tokens: Token ids of a prompt.
            namespace: Where to search.
        """
        self.tree.release(self._match_all(tokens, namespace))

    def put_first(self, tokens: Tokens, namespace: bytes = b"", num_kept: int = 0) -> int:
        """Evict the blocks of `tokens` before all others, as soon as room is needed, where nobody else needs them.

        A block that is pinned, that another cached prompt goes on from, or that another one has used since, stays where
        it is in line, and so do those before it. The next request that finds a block ends it.

        Args:
            tokens: Token ids of a prompt that nobody comes back to.
            namespace: Where to search.
            num_kept: Its first tokens that another prompt shares: their blocks stay, too.

        Returns:
            The number of tokens in these blocks.

        Raises:
            ValueError: num_kept is negative.
        """
        return self.tree.put_first(as_tokens(tokens), namespace, num_kept)

    def set_next_use(self, tokens: Tokens, namespace: bytes = b"", *, seconds: float) -> int:
        """Tell when a request for `tokens` is expected, such as the one after a tool's answer.

        The eviction "cost" heeds it: what is needed last goes first. The others do not.

        Args:
            tokens: Token ids of a prompt, as far as it is cached.
            namespace: Where to search.
            seconds: From now on. Of several that are told for a block, the earliest that is not over counts.

        Returns:
            The number of tokens in the blocks that have the time now.

        Raises:
            ValueError: seconds is negative, or 1e9 or more.
        """
        return self.tree.set_next_use(as_tokens(tokens), namespace, seconds=seconds)

    def drop_namespace(self, namespace: bytes) -> int:
        """Forget all cached blocks of a namespace that are neither in use nor pinned, in both tiers.

        Args:
            namespace: The namespace.

        Returns:
            The number of device blocks that are free now.
        """
        self.pins.expire()
        num_dropped = self.tree.drop_namespace(namespace)
        self.bury_companions()
        return num_dropped

    def clear(self) -> None:
        """Forget all cached blocks, in both tiers, and end all pins.

        Raises:
            RuntimeError: A match is not released. Nothing is forgotten.
        """
        num_held = self.tree.num_matches - len(self.pins)
        if num_held:
            raise RuntimeError(f"clear needs all matches to be released, {num_held} are not")
        self.pins.clear()
        for watcher in self._watchers:
            watcher.blocks_cleared()
        self.tree.clear()

    # --- questions ---

    def count(self, query: Query, num_device_tokens: int, num_host_tokens: int) -> None:
        """Count a prompt, and the tokens that it has found in each tier."""
        self._counts = self._counts.plus(query, num_device_tokens, num_host_tokens, self.block_size)

    def stats(self) -> SpaceStats:
        """Return the counters, and the state of the host tier now."""
        names = "evicted_blocks", "demoted_blocks", "written_blocks", "promoted_blocks", "host_evicted_blocks"
        return SpaceStats(
            **{f"{name}_tokens": count for name, count in self._counts._asdict().items()},
            **dict(zip(names, self.tree.counts, strict=True)),
            num_host_blocks=self.host_pool.num_blocks,
            num_free_host_blocks=self.host_pool.num_free,
            num_cached_host_blocks=self.tree.num_host_cached,
            num_pinned_blocks=self.pins.num_blocks,
            eviction=self.tree.eviction,
        )

    def check_host(self, owned_ids: list[int]) -> None:
        """Raise RuntimeError unless free, cached and owned host blocks make up the tier."""
        self.host_pool.check()
        total = self.host_pool.num_free + self.tree.num_host_cached + len(owned_ids)
        if total != self.host_pool.num_blocks or len(set(owned_ids)) != len(owned_ids):
            raise RuntimeError(
                f"{self.host_pool.num_free} free + {self.tree.num_host_cached} cached + {len(owned_ids)} owned host "
                f"blocks is not {self.host_pool.num_blocks}"
            )

    # --- inside ---

    @property
    def _keeps_evicted(self) -> bool:
        """Whether blocks are copied to the host."""
        return self.has_host_tier and (self.rule is None or self.rule.should_store())

    def _match_all(self, tokens: Tokens, namespace: bytes) -> Match:
        """Return the match, also of a prompt that is cached to its last token."""
        return self.tree.match(as_tokens(tokens), namespace, num_left_over=0, is_hit=False)

    def _send_out(self, match: Match) -> int:
        if not self._keeps_evicted:
            return 0
        num_free = self.pool.num_free
        self._moves.add_from("swap_out", lambda: self.tree.send_out(match))
        return self.pool.num_free - num_free

    def _evict(self, num_blocks: int) -> None:
        if self._keeps_evicted:
            self._moves.add_from("swap_out", lambda: self.tree.demote(num_blocks)[1])
        else:
            self.tree.evict(num_blocks)

    def _promote(self, match: Match, block_ids: Ids) -> None:
        self._moves.add_from("swap_in", lambda: self.tree.promote(match, block_ids))
