"""Session: the state of one conversation between its requests.

turn ─► supersede ─► [retain] ─► the next turn finds its prefix on the device
              │
              └─► pause: a tool runs; the blocks go down, and come back shortly before it is due

main     s s s s q q a a q q a a           branch("try", num_tokens=8)
try      s s s s q q a a x x y y           release("try"): x and y go before any other block
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from kvpage.blocks.explain import EditCost, EditMode
from kvpage.blocks.pins import PinTerms
from kvpage.blocks.sequence_state import Ids
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import as_integer, as_real
from kvpage.serving.sessions.branch import NO_TOKENS, BranchAdapter, SessionBranch, num_common
from kvpage.serving.sessions.edit import edited
from kvpage.serving.sessions.retention import Pause, Retention, Tier
from kvpage.serving.sessions.session_blocks import SessionBlocks

MAIN = "main"
MAX_NAME = 256
RETRY_SECONDS = 0.01


class SessionKeeper(Protocol):
    """What has a session: it bounds it, counts, and writes it down. owner_quota: of SessionConfig."""

    owner_quota: int | None

    def check_growth(self, session: "Session", num_tokens: int, num_branches: int) -> None:
        """ValueError unless the session may have so many more tokens and branches."""

    def changed(self, session: "Session") -> None:
        """The session is another one now."""

    def closed(self, session: "Session") -> None:
        """The session is closed."""

    def refused(self, num_branches: int) -> None:
        """Count branches whose blocks no quota had room for."""

    def lead(self, num_blocks: int) -> float:
        """Return the seconds before the end of a pause at which so many blocks come back."""

    def now(self) -> float:
        """Return the seconds of the clock."""


@dataclass(frozen=True, slots=True)
class BranchState:
    """A branch at one moment.

    Attributes:
        name: Its name.
        num_tokens: Its tokens.
        num_retained_blocks: Blocks that the session keeps of it.
        adapter: The name of the adapter of its last turn; None for the base model.
    """

    name: str
    num_tokens: int
    num_retained_blocks: int
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class SessionState:
    """A session at one moment.

    Attributes:
        session_id: Its id.
        namespace: Of its blocks.
        branches: Its branches, in the order in which they were made.
        retention: The terms on which its blocks are kept; None without any.
        paused_in: Where its blocks are during a pause; None without one.
        due_in: Seconds until the pause's next request is expected; negative if it is late; None without a pause.
        num_turns: Turns so far.
        edits: The last edit of each branch that was edited.
    """

    session_id: str
    namespace: bytes
    branches: tuple[BranchState, ...]
    retention: Retention | None
    paused_in: Tier | None
    due_in: float | None
    num_turns: int
    edits: tuple[EditCost, ...]


class Session:
    """One conversation. Make it by `Engine.session`. It belongs to the engine's thread, and calls come between steps.

    A session runs no requests: they are added as any others, in its namespace, and the path that a turn has made is
    given to `supersede`. Retained blocks never keep a request from running: where it needs room, they are given up, the
    lowest priority first. Every call but `close` raises RuntimeError after `close`, KeyError for an unknown branch, and
    has changed nothing when it raises.

    Args:
        blocks: What is done with blocks.
        keeper: What has it, bounds it and writes it down.
        has_record: Whether it is written down.

    Attributes:
        session_id: Its id.
        namespace: Of its requests and blocks.
        owner: To whom retained blocks are counted.
        retention: The terms on which its blocks are kept; None without any.
        num_turns: Turns so far.
        edits: The last edit of each branch, by name.
        has_record: Whether it is written down.
    """

    def __init__(
        self,
        session_id: str,
        namespace: bytes,
        owner: bytes,
        blocks: SessionBlocks,
        keeper: SessionKeeper,
        *,
        has_record: bool = True,
    ) -> None:
        self.session_id, self.namespace, self.owner, self.has_record = session_id, namespace, owner, has_record
        self.retention: Retention | None = None
        self.num_turns = 0
        self.edits: dict[str, EditCost] = {}
        self._blocks, self._keeper = blocks, keeper
        self._branches = {MAIN: SessionBranch(NO_TOKENS)}
        self._pause: Pause | None = None
        self._is_open = True

    # --- turns -------------------------------------------------------------------------------------------------------

    def tokens(self, branch: str = MAIN) -> Ids:
        """Return a branch's tokens, int32 [num_tokens], which are not to be changed.

        Args:
            branch: Its name.
        """
        return self._branch(branch).tokens

    def supersede(self, tokens: Tokens, branch: str = MAIN, adapter: str | None = None) -> int:
        """Put a new turn's path in place of a branch's tokens: its prompt, or its prompt and its answer.

        Blocks that only the old path needs are evicted before all others, from now on. The blocks of the new one are
        kept as `retain` has said. A pause ends. Paths of two adapters share no blocks: the branch has those of the new
        one alone.

        Args:
            tokens: Token ids of the whole path.
            branch: The branch's name.
            adapter: The name of the adapter that has computed it; None for the base model.

        Returns:
            The tokens of the blocks that give way.

        Raises:
            ValueError: The sessions would have too many tokens, or the adapter is not loaded.
            TypeError: The tokens are text.
        """
        self._check("supersede")
        line, path = self._branch(branch), as_tokens(tokens).copy()
        weights = None if adapter is None else self._blocks.adapter_of(adapter)
        self._keeper.check_growth(self, len(path) - len(line.tokens), 0)
        self._end_pause()
        self.num_turns += 1
        return self._put(line, path, weights)

    def edit(self, start: int, end: int, tokens: Tokens, branch: str = MAIN, mode: EditMode = "exact") -> EditCost:
        """Change a span of a branch's tokens; exactly, or by an erratum that is appended.

        Args:
            start: The first token of the span.
            end: The token after it; `start` for an insertion.
            tokens: Those in its place. As an erratum: those of the correction, which is appended.
            branch: The branch's name.
            mode: "exact": all behind the span is computed anew, what is before it stays. "erratum": the old text stays,
                with its blocks, and only the correction is computed.

        Returns:
            What it costs.

        Raises:
            ValueError: The span is not within the tokens, there is no such mode, or the sessions would have too many
                tokens.
            TypeError: An argument is of another type.
        """
        self._check("edit")
        line, span = self._branch(branch), (as_integer("start", start), as_integer("end", end))
        path = edited(line.tokens, *span, as_tokens(tokens), mode)
        self._keeper.check_growth(self, len(path) - len(line.tokens), 0)
        self._end_pause()
        num_released = self._put(line, path, line.adapter)
        num_to_compute = self._blocks.num_to_compute(path, self._name_of(line))
        cost = EditCost(self.session_id, branch, mode, *span, len(path), num_to_compute, num_released)
        self.edits[branch] = cost
        return cost

    # --- between turns -----------------------------------------------------------------------------------------------

    def retain(self, ttl: float | None = None, tier: Tier = "device", priority: int = 0) -> int:
        """Keep the blocks of all branches from now on, after each turn anew, as far as the quotas allow.

        Args:
            ttl: Seconds from the end of a turn, or from now; None for no limit.
            tier: "device"; "host": they leave the device at once; "store": they are stored, and cached as any others.
            priority: Retained blocks of lower numbers are given up first.

        Returns:
            The blocks that are kept now. A block of two branches counts twice.

        Raises:
            ValueError: `ttl` is not positive, there is no such tier, or the engine has none such.
            TypeError: An argument is of another type.
        """
        self._check("retain")
        retention = Retention(ttl, tier, priority)
        if tier == "host" and not self._blocks.has_host:
            raise ValueError("tier must not be 'host' without a host tier")
        if tier == "store" and not self._blocks.has_store:
            raise ValueError("tier must not be 'store' without a store")
        self.retention = retention
        self._keep(self._branches.values())
        self._keeper.changed(self)
        return self.num_retained_blocks

    def pause(self, expected_seconds: float) -> Tier:
        """Say that the next request comes in some seconds: a tool runs, for example.

        The blocks go to the host or to the store, if loading them again is expected to be faster than computing them,
        and the time suffices for both ways. They come back shortly before the next request is due, by the engine's
        steps. They are kept for twice that time at least, as far as the quotas allow.

        Args:
            expected_seconds: Until the next request.

        Returns:
            Where the blocks are meanwhile.

        Raises:
            ValueError: `expected_seconds` is not positive and finite.
            TypeError: It is no number.
        """
        self._check("pause")
        seconds = as_real("expected_seconds", expected_seconds)
        if not 0 < seconds < float("inf"):
            raise ValueError(f"expected_seconds must be positive and finite, got {seconds}")
        lines = list(self._branches.values())
        num_blocks = max(self._blocks.num_cached_blocks(line.tokens, self._name_of(line)) for line in lines)
        lead, now = self._keeper.lead(num_blocks), self._keeper.now()
        tier = self._blocks.choose_tier(num_blocks, seconds, lead) if num_blocks else "device"
        return_at = None if tier == "device" else now + seconds - lead
        self._pause = self._settled(Pause(tier, now + seconds, return_at, 2 * seconds), now)
        for line in lines:
            self._blocks.expect(line.tokens, self._name_of(line), seconds)
        self._keeper.changed(self)
        return self._pause.tier

    def resume(self) -> None:
        """End a pause now, and bring the blocks back. Without a pause nothing happens."""
        self._check("resume")
        if self._pause is not None:
            self._bring_back(self._pause)
            self._end_pause()
            self._keeper.changed(self)

    @property
    def return_at(self) -> float | None:
        """Seconds of the clock when blocks are to come back from a pause; None for never."""
        return None if self._pause is None else self._pause.return_at

    def tend(self, now: float) -> None:
        """Bring blocks back from a pause, or try again later where the device has no room; for the engine's steps.

        Args:
            now: Seconds of the clock.
        """
        pause = self._pause
        if pause is None or pause.return_at is None or now < pause.return_at:
            return
        self._pause = replace(pause, return_at=None)  # also if a move raises: then the request loads them itself
        if not self._bring_back(pause) and now < pause.due:
            self._pause = replace(pause, return_at=now + max((pause.due - now) / 2, RETRY_SECONDS))

    # --- branches ----------------------------------------------------------------------------------------------------

    def branch(self, name: str, source: str = MAIN, num_tokens: int | None = None) -> None:
        """Begin a branch with the first tokens of another one.

        Args:
            name: Its name, which no branch has.
            source: The other one's name.
            num_tokens: How many tokens; None for all.

        Raises:
            ValueError: The name is in use, empty or too long; num_tokens is out of range; or there are too many
                branches or tokens.
            TypeError: An argument is of another type.
        """
        self._check("branch")
        origin = self._branch(source)
        check_name("name", name)
        if name in self._branches:
            raise ValueError(f"name must not be in use, {name!r} is")
        most = len(origin.tokens)
        count = most if num_tokens is None else as_integer("num_tokens", num_tokens)
        if not 0 <= count <= most:
            raise ValueError(f"num_tokens must be in [0, {most}], got {count}")
        self._keeper.check_growth(self, count, 1)
        line = self._branches[name] = SessionBranch(origin.tokens[:count], adapter=origin.adapter)
        self._keep([line])
        self._keeper.changed(self)

    def release(self, branch: str) -> int:
        """End a branch: the blocks that only it needs are evicted before all others.

        Args:
            branch: Its name. "main" is emptied, and stays.

        Returns:
            The tokens of these blocks.
        """
        self._check("release")
        line = self._branch(branch)
        self.edits.pop(branch, None)
        if branch != MAIN:
            del self._branches[branch]
        return self._put(line, NO_TOKENS, None)

    def close(self) -> int:
        """End the session and all of its branches. Again, nothing happens.

        Returns:
            The tokens of the blocks that give way.
        """
        if not self._is_open:
            return 0
        num_released = sum([self.release(name) for name in [*self._branches][::-1]])
        self.forget()
        self._keeper.closed(self)
        return num_released

    def forget(self) -> None:
        """Let go of the blocks, which stay cached as any others, and take no more calls. Whoever has it calls this."""
        for line in self._branches.values():
            self._blocks.let_go(line)
        self._is_open, self._pause = False, None

    # --- questions ---------------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> Mapping[str, BranchAdapter]:
        """The adapters of branches whose last turns had one, by name."""
        return {name: line.adapter for name, line in list(self._branches.items()) if line.adapter is not None}

    def kv_namespace(self, branch: str = MAIN) -> bytes:
        """Return the namespace of a branch's blocks, as it is now.

        Args:
            branch: Its name.
        """
        return self._name_of(self._branch(branch))

    @property
    def branches(self) -> Mapping[str, int]:
        """The number of tokens of each branch, by name."""
        return {name: len(line.tokens) for name, line in list(self._branches.items())}

    @property
    def num_tokens(self) -> int:
        """Tokens of all branches."""
        return sum(len(line.tokens) for line in self._branches.values())

    @property
    def num_retained_blocks(self) -> int:
        """Blocks that are kept. A block of two branches counts twice."""
        lines = list(self._branches.values())  # all at once: statistics may be asked for in another thread
        return sum(self._blocks.num_kept(line) for line in lines)

    @property
    def keeps(self) -> bool:
        """Whether it has terms on which blocks are kept, or is paused."""
        return self.retention is not None or self._pause is not None

    @property
    def is_open(self) -> bool:
        """Whether it is not closed."""
        return self._is_open

    def state(self) -> SessionState:
        """Return the session as it is now."""
        pause = self._pause
        branches = (
            BranchState(
                name,
                len(line.tokens),
                self._blocks.num_kept(line),
                None if line.adapter is None else line.adapter.name,
            )
            for name, line in self._branches.items()
        )
        return SessionState(
            self.session_id,
            self.namespace,
            tuple(branches),
            self.retention,
            None if pause is None else pause.tier,
            None if pause is None else pause.due - self._keeper.now(),
            self.num_turns,
            tuple(self.edits.values()),
        )

    def restore(
        self,
        tokens: Mapping[str, Ids],
        retention: Retention | None,
        num_turns: int,
        adapters: Mapping[str, BranchAdapter],
    ) -> None:
        """Take over what a record has. Nothing is retained before the next turn: the blocks are to be found first.

        Args:
            tokens: Of each branch, by name; "main" is among them.
            retention: The terms of later turns.
            num_turns: Turns so far.
            adapters: Those of branches that have one, by name.
        """
        self._branches = {name: SessionBranch(path, adapter=adapters.get(name)) for name, path in tokens.items()}
        self.retention, self.num_turns = retention, num_turns

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._is_open:
            raise RuntimeError(f"session {self.session_id!r} is closed")

    def _check(self, call: str) -> None:
        """Raise RuntimeError unless the session may be called now; ValueError for a namespace that is too long now."""
        self._check_open()
        self._blocks.check_call(call, self.namespace)

    def _branch(self, name: str) -> SessionBranch:
        self._check_open()
        if name not in self._branches:
            raise KeyError(f"branch must be one of session {self.session_id!r}, got {name!r}")
        return self._branches[name]

    def _settled(self, pause: Pause, now: float) -> Pause:
        """Begin a pause; return it with the tier that its blocks are in then: quotas, or others' use, may keep them."""
        lines, self._pause = list(self._branches.values()), pause
        self._keep(lines)
        if pause.tier == "store" or not self._blocks.has_host:
            return pause
        if pause.tier == "device":
            self._bring_back(pause)
        if not any(self._blocks.num_on_host(line.tokens, self._name_of(line)) for line in lines):
            return replace(pause, tier="device", return_at=None)
        return_at = now + min(RETRY_SECONDS, pause.due - now) if pause.return_at is None else pause.return_at
        return replace(pause, tier="host", return_at=return_at)

    def _end_pause(self) -> None:
        if self._pause is not None:
            self._pause = None
            self._keep(self._branches.values())

    def _put(self, line: SessionBranch, tokens: Ids, adapter: BranchAdapter | None) -> int:
        """Give a branch other tokens; return those of the blocks that give way."""
        before, old_digest, old_name = line.tokens, line.digest, self._name_of(line)
        line.tokens, line.adapter = tokens, adapter
        self._keep([line])
        if line.pin is None and len(tokens):
            self._blocks.touch(tokens, self._name_of(line))
        sharing = [other.tokens for other in self._branches.values() if other.digest == old_digest]
        num_needed = max((num_common(before, path) for path in sharing), default=0)
        num_released = 0
        if num_needed < len(before):
            num_released = self._blocks.give_way(before, old_name, num_needed)
        self._keeper.changed(self)
        return num_released

    def _keep(self, lines: Iterable[SessionBranch]) -> None:
        """Keep what is cached of branches, on the terms that hold now."""
        terms, tier = self._terms()
        lines, num_refused = list(lines), 0
        for line in lines:
            if terms is None or not len(line.tokens):
                self._blocks.let_go(line)
            elif not self._blocks.keep(line, self._name_of(line), terms, tier):
                num_refused += 1
        if tier == "host":
            self._blocks.send_down(lines)
        self._keeper.refused(num_refused)

    def _terms(self) -> tuple[PinTerms | None, Tier]:
        """Return the terms of pins, None for no pins at all, and the tier."""
        pause, retention = self._pause, self.retention
        if retention is None and pause is None:
            return None, "device"
        terms = retention or Retention()
        ttl, tier, priority = terms.ttl, terms.tier, terms.priority
        if pause is not None:
            ttl = None if retention is not None and ttl is None else max(pause.keep_seconds, ttl or 0.0)
            tier = "device" if pause.return_at is None else pause.tier
        return PinTerms(ttl, priority, self.owner, self._keeper.owner_quota), tier

    def _bring_back(self, pause: Pause) -> bool:
        """Bring the blocks of all branches back; return whether all have room."""
        lines = self._branches.values()
        return all([self._blocks.bring_back(line.tokens, self._name_of(line), pause.tier) for line in lines])

    def _name_of(self, line: SessionBranch) -> bytes:
        """Return the namespace of a branch's blocks, as it is now."""
        return self._blocks.named(self.namespace, line.digest)


def check_name(name: str, value: str) -> None:
    """Raise ValueError or TypeError unless a value is a name of 1 to 256 characters."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {type(value).__name__}")
    if not 0 < len(value) <= MAX_NAME:
        raise ValueError(f"{name} must have 1 to {MAX_NAME} characters, got {len(value)}")
