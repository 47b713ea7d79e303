"""CacheWork: what requests ask of the cache beside their answers: hints, and turns of sessions.

    before   a session is made where there is none: it is the one that was used last
    after    its branch takes the path of the prompt and the answer; then pins, demotions, releases and pauses

A hint never fails a request. All of it is done on the engine's thread, between two steps.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256

from kvpage.blocks.pins import PinTerms
from kvpage.cache.cache_engine import CacheEngine
from kvpage.checks.tokens import as_tokens
from kvpage.server.running.response_turns import Leaving, ResponseTurn
from kvpage.serving import AsyncEngine, EngineClosed
from kvpage.serving.engine import Engine
from kvpage.serving.sessions.session import Session

logger = logging.getLogger(__name__)
FOLLOWED, REFUSED = "followed", "refused"


@dataclass(frozen=True, slots=True)
class CacheWishes:
    """What a request asks of the cache.

    Attributes:
        session_id: The session of which it is a turn; None for none.
        branch: The session's branch.
        pin_ttl: Seconds for which the prompts stay pinned afterwards; None for not at all.
        demotes: Whether the blocks of the prompts are to leave the device afterwards.
        releases: Whether the blocks that only the prompts need are to be evicted first afterwards.
        next_use: Seconds until the session's next request; None where nothing is said.
        adapter: The adapter that computes the answers; None for none.
        tenant: Who asks, to whom pins are counted.
        is_of_chain: Whether a chain of responses has made the session. It has no record, as these have none.
        is_first: Whether the answer makes the session, of which nobody knows yet.
    """

    session_id: str | None = None
    branch: str = "main"
    pin_ttl: float | None = None
    demotes: bool = False
    releases: bool = False
    next_use: float | None = None
    adapter: str | None = None
    tenant: str = ""
    is_of_chain: bool = False
    is_first: bool = False

    def in_turn(self, turn: ResponseTurn) -> "CacheWishes":
        """Return the wishes of a response that becomes a turn of a session."""
        line = turn.line
        return replace(
            self,
            session_id=line.session_id,
            branch=line.branch,
            is_of_chain=turn.owns_session,
            is_first=turn.is_first,
        )

    @property
    def has_hints(self) -> bool:
        """Whether there is something to do after the answer, besides the session's turn."""
        return self.pin_ttl is not None or self.demotes or self.releases or self.next_use is not None

    def owner(self, namespace: bytes) -> bytes:
        """Return to whom retained blocks are counted: the tenant, or without one the namespace."""
        return self.tenant.encode() or namespace


class CacheWork:
    """Does what requests ask of the cache.

    Args:
        engine: The engine.
        tenant_pin_quota: Blocks that the pins of one tenant hold at most; None for all that the engine's quota allows.

    Attributes:
        has_blocks: Whether the cached blocks are in this process; a gateway's workers have theirs elsewhere.
        hints: How often hints were followed or refused, by kind and outcome.
    """

    def __init__(self, engine: AsyncEngine, tenant_pin_quota: int | None) -> None:
        self._engine, self._quota = engine, tenant_pin_quota
        self.has_blocks = isinstance(engine.engine.cache, CacheEngine)
        self.hints: Counter[tuple[str, str]] = Counter()
        self._pins: dict[tuple[object, ...], int] = {}  # by whom, and of what: the handle

    def begin(self, wishes: CacheWishes, namespace: bytes) -> None:
        """Begin a turn of a session, before its prompt is queued. Its tokens stay: the request may fail.

        Args:
            wishes: What the request asks.
            namespace: Of the session.
        """
        if wishes.session_id is not None and self.has_blocks and not wishes.is_first:
            self._call(lambda engine: self._open(engine, wishes, namespace))

    def end(
        self, wishes: CacheWishes, prompts: Sequence[Sequence[int]], namespace: bytes, answer: Sequence[int] | None
    ) -> None:
        """Follow what a request has asked, once it has ended.

        Args:
            wishes: What the request asks.
            prompts: The token ids of each prompt.
            namespace: Of their blocks.
            answer: The token ids of the answer, for a session; None where there is none, and its tokens stay.
        """
        if wishes.session_id is None and not wishes.has_hints:
            return
        if not self.has_blocks:
            logger.info("hints were not followed: the blocks are those of workers elsewhere")
            return

        def work(engine: Engine) -> None:
            if wishes.session_id is not None and answer is not None:
                self._turn(engine, wishes, [*prompts[0], *answer], namespace)
            for prompt in prompts if wishes.has_hints else ():
                self._follow(engine, wishes, prompt, namespace)

        self._call(work)

    def leave(self, leaving: Leaving | None, tenant: str) -> None:
        """Shorten or release a branch, or close a session, whose last response is gone.

        Args:
            leaving: What the session loses; None for nothing.
            tenant: Whose it is.
        """
        if leaving is not None:
            self._call(lambda engine: self._leave(engine, leaving, tenant.encode() or leaving.line.namespace))

    # --- on the engine's thread --------------------------------------------------------------------------------------

    def _open(self, engine: Engine, wishes: CacheWishes, namespace: bytes) -> Session | None:
        """Return the session of a request, a new one if there is none; None beyond the limits of sessions."""
        assert wishes.session_id is not None
        owner, has_record = wishes.owner(namespace), not wishes.is_of_chain
        try:
            return engine.session(wishes.session_id, namespace, owner, has_record=has_record)
        except ValueError as error:
            logger.info("a request has no session: %s", error)
            return None

    def _leave(self, engine: Engine, leaving: Leaving, owner: bytes) -> None:
        line = leaving.line
        session = engine.sessions.find(line.session_id, line.namespace, owner, has_record=leaving.has_record)
        if session is None:
            return
        try:
            if leaving.closes:
                session.close()
            elif session.branches.get(line.branch) != leaving.num_tokens:  # another turn, or an edit, came after it
                return
            elif leaving.num_left:
                session.edit(leaving.num_left, leaving.num_tokens, [], line.branch)
            else:
                session.release(line.branch)
        except ValueError as error:
            logger.info("a deleted response stays in its session: %s", error)

    def _turn(self, engine: Engine, wishes: CacheWishes, path: Sequence[int], namespace: bytes) -> None:
        """Give a session's branch the path of a turn; a new branch, where there is none of this name."""
        session = self._open(engine, wishes, namespace) if wishes.is_first else self._found(engine, wishes, namespace)
        if session is None:  # closed since the request began
            return
        is_new = wishes.branch not in session.branches
        try:
            if is_new:
                session.branch(wishes.branch, num_tokens=0)
            session.supersede(path, wishes.branch, wishes.adapter)
        except ValueError as error:  # beyond the limits of sessions, or its adapter is gone
            logger.info("a turn of %d tokens is not in its session: %s", len(path), error)
            if is_new and wishes.branch in session.branches:
                session.release(wishes.branch)

    def _found(self, engine: Engine, wishes: CacheWishes, namespace: bytes) -> Session | None:
        assert wishes.session_id is not None
        owner, has_record = wishes.owner(namespace), not wishes.is_of_chain
        return engine.sessions.find(wishes.session_id, namespace, owner, has_record=has_record)

    def _follow(self, engine: Engine, wishes: CacheWishes, prompt: Sequence[int], own_namespace: bytes) -> None:
        space, namespace = engine.manager.space, engine.kv_namespace(own_namespace, wishes.adapter)
        if wishes.demotes:
            self._count("kv.demote", lambda: space.demote(prompt, namespace) > 0)
        if wishes.pin_ttl is not None:
            terms = PinTerms(wishes.pin_ttl, 0, wishes.owner(own_namespace), self._quota)
            self._count("kv.pin", lambda: self._pin(engine, wishes, prompt, namespace, terms))
        if wishes.next_use is not None:
            self._count("kv.next_use", lambda: self._expect(engine, wishes, prompt, own_namespace))
        if wishes.releases:
            self._count("kv.release", lambda: bool(space.put_first(prompt, namespace)))

    def _pin(
        self, engine: Engine, wishes: CacheWishes, prompt: Sequence[int], namespace: bytes, terms: PinTerms
    ) -> bool:
        """Pin a prompt in place of what the same branch, or without a session the same prompt, has pinned before."""
        space = engine.manager.space
        self._pins = {key: handle for key, handle in self._pins.items() if space.pins.num_blocks_of(handle)}
        key: tuple[object, ...] = (namespace, terms.owner, wishes.session_id, wishes.branch)
        if wishes.session_id is None:
            key = (*key, sha256(as_tokens(prompt).tobytes()).digest())
        handle = space.pin(prompt, namespace, terms=terms, in_place_of=self._pins.get(key))
        if space.pins.num_blocks_of(handle):
            self._pins[key] = handle
            return True
        space.unpin(handle)  # nothing of it is cached
        return False

    def _expect(self, engine: Engine, wishes: CacheWishes, prompt: Sequence[int], namespace: bytes) -> bool:
        """Have a session pause; without one, tell the order of eviction alone."""
        assert wishes.next_use is not None
        if wishes.session_id is None:
            kv_namespace = engine.kv_namespace(namespace, wishes.adapter)
            return engine.manager.tree.set_next_use(prompt, kv_namespace, seconds=wishes.next_use) > 0
        session = self._found(engine, wishes, namespace)
        if session is None:
            return False
        session.pause(wishes.next_use)
        return True

    def _count(self, kind: str, work: Callable[[], bool]) -> None:
        """Follow a hint, and count whether that has had an effect."""
        try:
            is_followed = work()
        except ValueError as error:
            logger.info("a hint %s was not followed: %s", kind, error)
            is_followed = False
        self.hints[kind, FOLLOWED if is_followed else REFUSED] += 1

    def _call(self, work: Callable[[Engine], object]) -> None:
        with suppress(EngineClosed):
            self._engine.call(work)
