"""BlockSpace: the blocks of both tiers, free and cached, and what has to be copied between them. It knows no sequences.

take(n)   free blocks ◄── evict ◄── cached, unpinned ──► demote ──► host blocks ──► evicted there, too
give(m)   a match's blocks from the host come back, the rest is free blocks
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvpage._C import BlockPool, Match, PartMatch, PrefixTree
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.moves import BlockMove, BlockMoves, Kind
from kvpage.blocks.pins import UserPins
from kvpage.blocks.table import Ids
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.tokens import Tokens, as_tokens


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """When a cached block gets its copy on the host.

    after_hits: None, when it is evicted from the device. 0, as soon as it is cached. n, when n requests have found it.
        An early copy costs a transfer that may never be needed, and makes a later eviction free.
    """

    after_hits: int | None = None

    def __post_init__(self) -> None:
        hits = self.after_hits
        if hits is not None and (isinstance(hits, bool) or not isinstance(hits, int) or hits < 0):
            raise ValueError(f"after_hits must be None or an integer of at least 0, got {hits!r}")


@dataclass(frozen=True, slots=True)
class SpaceStats:
    """Counters since the space was made, and the state of the host tier now. Tokens or blocks, as the names say.

    device_hit_tokens, host_hit_tokens: of prompts, found in that tier. part_hit_tokens: parts of blocks, copied.
    refused_tokens: found on the host and left there, because computing was expected to be faster; once for each try.
    evicted_blocks: have left the device; demoted_blocks of them were copied to the host for it, written_blocks early.
    """

    query_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    part_hit_tokens: int
    refused_tokens: int
    evicted_blocks: int
    demoted_blocks: int
    written_blocks: int
    promoted_blocks: int
    num_host_blocks: int
    num_free_host_blocks: int
    num_cached_host_blocks: int
    num_pinned_blocks: int

    @property
    def miss_tokens(self) -> int:
        return self.query_tokens - self.device_hit_tokens - self.host_hit_tokens - self.part_hit_tokens

    @property
    def host_evicted_blocks(self) -> int:
        """Cached blocks that have left the host, also those that were dropped."""
        return self.demoted_blocks + self.written_blocks - self.num_cached_host_blocks


class BlockSpace:
    """Pools and tree. Each method gives all or nothing. Not thread-safe."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        host_policy: HostPolicy | None = None,
        rule: LoadOrCompute | None = None,
        pin_quota: int = 0,
    ) -> None:
        if host_policy is not None and not isinstance(host_policy, HostPolicy):
            raise TypeError(f"host_policy must be a HostPolicy, got {type(host_policy).__name__}")
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_host_blocks)
        self.tree = PrefixTree(self.pool, block_size, self.host_pool if num_host_blocks else None)
        self.block_size = block_size
        self.host_policy = host_policy or HostPolicy()
        self.rule = rule
        self.pins = UserPins(self.tree, pin_quota)
        self._moves = BlockMoves()
        self._counts = dict.fromkeys(("query", "device_hit", "host_hit", "part_hit", "refused"), 0)
        self._blocks = dict.fromkeys(("evicted", "demoted", "written", "promoted"), 0)

    # --- moves ---

    @property
    def has_moves(self) -> bool:
        return bool(self._moves)

    def take_moves(self) -> BlockMoves:
        moves, self._moves = self._moves, BlockMoves()
        return moves

    def due_moves(self) -> Iterator[BlockMove]:
        return self._moves.due()

    def do_moves(self, each: Callable[[BlockMove], object]) -> None:
        self._moves.do(each)

    def move(self, kind: Kind, pairs: Iterable[tuple[int, int]]) -> None:
        self._moves.add(kind, pairs)

    # --- blocks ---

    @property
    def num_free(self) -> int:
        """Device blocks that can be handed out: free ones, and cached ones in nobody's use."""
        return self.pool.num_free + self.tree.num_evictable

    def take(self, num_blocks: int) -> Ids:
        """Free device blocks, evicting what lacks, and ending users' pins where that is not enough but they are.
        OutOfBlocks, with nothing evicted and no pin ended but those that had their time.
        """
        if num_blocks > self.num_free:
            self.pins.expire()
        if num_blocks > self.num_free:
            self.pins.give_up(num_blocks - self.num_free)
        lacking = num_blocks - self.pool.num_free
        if lacking > self.tree.num_evictable:
            raise OutOfBlocks(num_blocks, self.num_free)
        if lacking > 0:
            self._evict(lacking)
        return self.pool.allocate(num_blocks)

    def take_host(self, num_blocks: int) -> Ids:
        """Free host blocks, evicting what lacks there. OutOfBlocks before anything is evicted."""
        lacking = num_blocks - self.host_pool.num_free
        if lacking > self.tree.num_host_evictable:
            raise OutOfBlocks(num_blocks, self.host_pool.num_free + self.tree.num_host_evictable)
        if lacking > 0:
            self.tree.evict_host(lacking)
        return self.host_pool.allocate(num_blocks)

    def release_host(self, host_ids: Ids) -> None:
        self.host_pool.release(host_ids)

    def give(self, match: Match, num_blocks: int) -> Ids:
        """Brings what of the match is on the host to the device, and takes free blocks up to `num_blocks` in all:
        returns these. OutOfBlocks, and the match is as it was.
        """
        num_on_device = match.num_device_blocks
        num_host = match.num_blocks - num_on_device
        taken = self.take(num_blocks - num_on_device)
        self._count_hits(num_on_device, num_host)
        if num_host:
            self._promote(match, taken[:num_host])
        if self.host_policy.after_hits:
            self._write_out(match, self.host_policy.after_hits)
        return taken[num_host:]

    def copy_part(self, part: PartMatch, taken: Ids) -> int:
        """The block's shared part comes into the first of `taken`: the number of its tokens. Ends the part's pin."""
        kind: Kind = "copy" if part.is_on_device else "swap_in"
        self._moves.add(kind, [(part.block_id, int(taken[0]))])
        self.tree.release(part.match)
        return part.num_tokens

    def match(self, tokens: Ids, namespace: bytes, priority: int = 0, num_left_over: int = 1) -> Match:
        """The cached prefix of `tokens`, without what is on the host and expected to be computed faster than loaded.

        num_left_over: as many tokens at least are left to compute.
        """
        match = self.tree.match(tokens, namespace, priority, num_left_over)
        num_host = match.num_blocks - match.num_device_blocks if self.tree.has_host_tier else 0
        if num_host and self.rule is not None and not self.rule.should_load(num_host):
            self.tree.trim(match)
            self._counts["refused"] += num_host * self.block_size
        return match

    def inserted(self, match: Match) -> None:
        """The end of a path has been cached."""
        if self.host_policy.after_hits == 0:
            self._write_out(match, 0)

    # --- hints and pins ---

    def pin(self, tokens: Tokens, namespace: bytes = b"", ttl: float | None = None) -> int:
        """Keeps the cached prefix of `tokens`, in whichever tier it is, for `ttl` seconds or until `unpin`; returns a
        handle. Requests come first: pins end, the oldest first, where one fits by that and not without, so that what
        users pin makes no request wait for ever. ValueError beyond the quota.
        """
        match = self._match_all(tokens, namespace)
        try:
            return self.pins.add(match, ttl)
        except BaseException:
            self.tree.release(match)
            raise

    def unpin(self, handle: int) -> None:
        """Ends a pin; one that has ended already is fine. KeyError for a handle that was never given."""
        self.pins.remove(handle)

    def prefetch(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Brings what of the tokens' prefix is on the host to the device, if there is room: how many tokens it was."""
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
        """Forgets the blocks of `tokens` that nobody uses and no other cached prompt shares: how many tokens it was."""
        return self.tree.drop(as_tokens(tokens), namespace)

    def clear(self) -> None:
        """Forgets all that is cached, in both tiers, and ends all pins. RuntimeError, and nothing is forgotten, while
        somebody holds a match.
        """
        num_held = self.tree.num_matches - len(self.pins)
        if num_held:
            raise RuntimeError(f"clear needs all matches to be released, {num_held} are not")
        self.pins.clear()
        self.tree.clear()

    # --- questions ---

    def count_query(self, num_tokens: int, num_part_tokens: int) -> None:
        self._counts["query"] += num_tokens
        self._counts["part_hit"] += num_part_tokens

    def stats(self) -> SpaceStats:
        return SpaceStats(
            **{f"{name}_tokens": count for name, count in self._counts.items()},
            **{f"{name}_blocks": count for name, count in self._blocks.items()},
            num_host_blocks=self.host_pool.num_blocks,
            num_free_host_blocks=self.host_pool.num_free,
            num_cached_host_blocks=self.tree.num_host_cached,
            num_pinned_blocks=self.pins.num_blocks,
        )

    def check_host(self, owned_ids: list[int]) -> None:
        """RuntimeError unless free, cached and owned host blocks make up the tier."""
        self.host_pool.check()
        total = self.host_pool.num_free + self.tree.num_host_cached + len(owned_ids)
        if total != self.host_pool.num_blocks or len(set(owned_ids)) != len(owned_ids):
            raise RuntimeError(
                f"{self.host_pool.num_free} free + {self.tree.num_host_cached} cached + {len(owned_ids)} owned host "
                f"blocks is not {self.host_pool.num_blocks}"
            )

    # --- inside ---

    def _match_all(self, tokens: Tokens, namespace: bytes) -> Match:
        """Also of a prompt that is cached to its last token."""
        return self.tree.match(as_tokens(tokens), namespace, num_left_over=0)

    def _evict(self, num_blocks: int) -> None:
        self._blocks["evicted"] += num_blocks
        if self.rule is not None and not self.rule.should_store():
            self.tree.evict(num_blocks)
            return
        self._blocks["demoted"] += self._moves.add_from("swap_out", lambda: self.tree.demote(num_blocks)[1])

    def _write_out(self, match: Match, min_hits: int) -> None:
        if not self.tree.has_host_tier or (self.rule is not None and not self.rule.should_store()):
            return
        self._blocks["written"] += self._moves.add_from("swap_out", lambda: self.tree.write_out(match, min_hits))

    def _promote(self, match: Match, block_ids: Ids) -> None:
        self._blocks["promoted"] += self._moves.add_from("swap_in", lambda: self.tree.promote(match, block_ids))

    def _count_hits(self, num_on_device: int, num_host: int) -> None:
        self._counts["device_hit"] += num_on_device * self.block_size
        self._counts["host_hit"] += num_host * self.block_size
