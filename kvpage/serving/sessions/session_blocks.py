"""SessionBlocks: what sessions do with the blocks of one manager: pins, moves between the tiers, a store.

a turn ends ─► keep ─► a pin: on the device, or sent to the host at once; or the store has them
a pause     ─► choose_tier ─► keep ─► ... ─► bring_back, shortly before its end
a path that nobody comes back to ─► give_way: its blocks are evicted before all others
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.pins import PinTerms, QuotaExceeded
from kvpage.blocks.sequence_state import Ids
from kvpage.serving.sessions.branch import BranchAdapter, SessionBranch
from kvpage.serving.sessions.retention import Tier

MOST_SECONDS = 1e8
"""More than three years: no later use is told apart."""


class SessionStore(Protocol):
    """The side of a store's connector that sessions use."""

    @property
    def rule(self) -> LoadOrCompute | None:
        """Whether loading is worth it; None for always."""

    def save(self, tokens: Ids, namespace: bytes) -> None:
        """Store tokens that are cached."""

    def prefetch(self, tokens: Ids, namespace: bytes) -> None:
        """Bring what is stored of tokens nearer, within the store."""


def no_adapter(name: str) -> BranchAdapter:
    """Raise ValueError: a loop of one's own names adapters by namespaces.

    Args:
        name: Of an adapter.
    """
    raise ValueError(f"adapter must be None without an engine, got {name!r}")


class SessionBlocks:
    """The blocks of sessions. For the manager's thread.

    Args:
        manager: The manager.
        run_moves: Makes the moves that are due; None where the loop makes them before its next step.
        store: Returns the store; it returns None while there is none.
        named: Returns the namespace of the blocks for that of the requests and an adapter's digest, as it is now.
        check_between_steps: Raises RuntimeError unless the call of a name may be made now, by this thread.
        adapter_of: Returns the adapter of a name; ValueError for one that is not loaded.

    Attributes:
        check_between_steps: As given.
        named: As given.
        adapter_of: As given.
    """

    def __init__(
        self,
        manager: BlockManager,
        run_moves: Callable[[], object] | None = None,
        store: Callable[[], SessionStore | None] = lambda: None,
        named: Callable[[bytes, str], bytes] = lambda namespace, digest: namespace,
        check_between_steps: Callable[[str], object] = lambda call: None,
        adapter_of: Callable[[str], BranchAdapter] = no_adapter,
    ) -> None:
        self._manager, self._space, self.named = manager, manager.space, named
        self._run_moves, self._store = run_moves or (lambda: None), store
        self.check_between_steps, self.adapter_of = check_between_steps, adapter_of

    def check_call(self, call: str, namespace: bytes) -> None:
        """RuntimeError unless a session may be called now; ValueError where blocks can have no such namespace now."""
        self.check_between_steps(call)
        self.named(namespace, "")

    # --- kept --------------------------------------------------------------------------------------------------------

    def keep(self, branch: SessionBranch, namespace: bytes, terms: PinTerms, tier: Tier) -> bool:
        """Keep what is cached of a branch in place of what was kept of it before; return whether the quotas allow it.

        Args:
            branch: The branch.
            namespace: Of its blocks, as `named` gives it; so of the calls below.
            terms: For how long, and for whom.
            tier: Where. Nothing stays pinned for "store". For "host", `send_down` is to follow.
        """
        if tier == "store":
            self._save(branch.tokens, namespace)
            self.let_go(branch)
            return True
        try:
            pin = self._space.pin(branch.tokens, namespace, terms=terms, in_place_of=branch.pin)
        except QuotaExceeded:
            self.let_go(branch)
            return False
        branch.pin = pin
        return True

    def send_down(self, branches: Iterable[SessionBranch]) -> None:
        """Have the blocks that are kept of branches leave the device for the host, as far as nobody else needs them.

        Args:
            branches: All of them are kept by now, so that none takes another one's place on the host.
        """
        if sum([self._space.send_out(branch.pin) for branch in branches if branch.pin is not None]):
            self._run_moves()

    def let_go(self, branch: SessionBranch) -> None:
        """Keep nothing of a branch: its blocks are cached as any others."""
        if branch.pin is not None:
            self._space.unpin(branch.pin)
            branch.pin = None

    def touch(self, tokens: Ids, namespace: bytes) -> None:
        """Note a use of what is cached of tokens: what was to be evicted before all others no longer is."""
        self._space.touch(tokens, namespace)

    def num_kept(self, branch: SessionBranch) -> int:
        """Return how many blocks are kept of a branch."""
        pin = branch.pin  # once: statistics may be asked for in another thread
        return 0 if pin is None else self._space.pins.num_blocks_of(pin)

    def give_way(self, tokens: Ids, namespace: bytes, num_kept: int) -> int:
        """Evict the blocks of tokens before all others, but those of the first `num_kept` and what others need.

        Returns how many tokens' blocks that are.
        """
        return self._space.put_first(tokens, namespace, num_kept)

    # --- a pause -----------------------------------------------------------------------------------------------------

    def choose_tier(self, num_blocks: int, seconds: float, lead: float) -> Tier:
        """Return where blocks do best to be for some seconds: down if loading them is worth it, and both ways fit in.

        lead: the seconds that the way back is begun early.
        """
        if seconds <= 2 * lead:
            return "device"
        if self.has_host and self._space.should_load(num_blocks):
            return "host"
        store = self._store()
        if store is not None and (store.rule is None or store.rule.should_load(num_blocks)):
            return "store"
        return "device"

    def expect(self, tokens: Ids, namespace: bytes, seconds: float) -> None:
        """Tell the order of eviction when a path is expected to be used again."""
        self._manager.tree.set_next_use(tokens, namespace, seconds=min(seconds, MOST_SECONDS))

    def load_seconds(self, num_blocks: int) -> float:
        """Return how long blocks take from the host; 0 where that is not known."""
        rule = self._space.rule
        return 0.0 if rule is None else rule.load_seconds(num_blocks) or 0.0

    def bring_back(self, tokens: Ids, namespace: bytes, tier: Tier) -> bool:
        """Bring blocks back from where a pause has sent them; return False where the device has no room now."""
        if tier == "store":
            store = self._store()
            if store is not None:
                store.prefetch(tokens, namespace)
            return True
        if self._space.prefetch(tokens, namespace):
            self._run_moves()
        return not self.num_on_host(tokens, namespace)

    def num_on_host(self, tokens: Ids, namespace: bytes) -> int:
        """Return how many of the cached blocks of tokens are on the host alone."""
        return int((self._manager.tree.look(tokens, namespace)[0][0] < 0).sum())

    # --- questions ---------------------------------------------------------------------------------------------------

    def num_cached_blocks(self, tokens: Ids, namespace: bytes) -> int:
        """Return how many blocks of the tokens are cached, in either tier."""
        num_blocks: int = self._manager.tree.look(tokens, namespace)[0].shape[1]
        return num_blocks

    def num_to_compute(self, tokens: Ids, namespace: bytes) -> int:
        """Return how many of the tokens a request would compute."""
        if not len(tokens):
            return 0
        manager, size = self._manager, self._manager.block_size
        num_cached, num_common = manager.num_cached(tokens, namespace), manager.tree.look(tokens, namespace)[1]
        most = min(num_common, len(tokens) - 1)
        if manager.share_parts and num_cached // size == most // size:  # a part of the next block is shared, too
            num_cached = most
        return len(tokens) - num_cached

    @property
    def has_host(self) -> bool:
        """Whether there is a host tier."""
        return self._space.host_pool.num_blocks > 0

    @property
    def has_store(self) -> bool:
        """Whether there is a store."""
        return self._store() is not None

    def _save(self, tokens: Ids, namespace: bytes) -> None:
        store = self._store()
        if store is not None:
            store.save(tokens, namespace)
