"""SessionLife: random sessions over one BlockManager, beside other prompts. The oracle is a dictionary of token lists.

What a block holds is followed through all moves, so a prefix that is found is the one that was computed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.life import Life, Operation

from kvpage import BlockManager
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.serving.sessions.branch import num_common
from kvpage.serving.sessions.config import SessionConfig
from kvpage.serving.sessions.session import MAIN, Session
from kvpage.serving.sessions.session_blocks import SessionBlocks
from kvpage.serving.sessions.sessions import Sessions

B = 2


@dataclass(frozen=True)
class SessionWorld:
    num_blocks: int
    num_host_blocks: int
    quota: int
    config: SessionConfig = field(default_factory=SessionConfig)
    rule: LoadOrCompute | None = None

    def life(self, seed: int) -> "SessionLife":
        return SessionLife(seed, self)


WORLDS = [
    SessionWorld(40, 0, 20),
    SessionWorld(24, 32, 24, SessionConfig(owner_quota=10)),
    SessionWorld(12, 8, 12, SessionConfig(max_sessions=3, max_tokens=120, max_branches=3)),
    SessionWorld(30, 30, 30, rule=LoadOrCompute(1000, B, bytes_per_second=1e5, tokens_per_second=10.0)),
    SessionWorld(30, 30, 30, rule=LoadOrCompute(1000, B, bytes_per_second=1e3, tokens_per_second=1e6)),
]


class SessionLife(Life):
    """texts: the tokens of each branch, by session and name, as the oracle has them."""

    def __init__(self, seed: int, world: SessionWorld) -> None:
        super().__init__(seed)
        self.world, self.time = world, 0.0
        options = {"num_host_blocks": world.num_host_blocks, "pin_quota": world.quota}
        self.manager = BlockManager(world.num_blocks, B, rule=world.rule, **options)
        self.space = self.manager.space
        self.space.pins._clock = lambda: self.time
        blocks = SessionBlocks(self.manager, self.move)
        self.sessions = Sessions(blocks, world.config, clock=lambda: self.time)
        self.texts: dict[tuple[bytes, str], dict[str, list[int]]] = {}
        self.device: dict[int, Any] = {}
        self.host: dict[int, Any] = {}
        self.num_requests = 0

    def operations(self) -> dict[Operation, float]:
        return {
            self.turn: 8, self.retry: 3, self.edit: 3, self.branch: 2, self.release: 1, self.close: 0.4, self.retain: 3,
            self.pause: 3, self.resume: 1, self.wait: 4, self.stranger: 5, self.giant: 0.3, self.demote: 1,
            self.wrong: 1,
        }  # fmt: skip

    # --- blocks ---

    def move(self) -> None:
        def do(move: Any) -> None:
            source, target = {
                "swap_out": (self.device, self.host), "swap_in": (self.host, self.device),
                "copy": (self.device, self.device),
            }[move.kind]  # fmt: skip
            values = [source.get(int(a)) for a, _ in move.pairs]
            target |= {int(b): value for (_, b), value in zip(move.pairs, values, strict=True)}

        self.manager.do_moves(do)

    def request(self, tokens: list[int], name: bytes) -> int:
        """Compute a prompt as a request does; return how many tokens were found. It always fits: nothing else runs."""
        self.num_requests += 1
        found = self.manager.allocate(self.num_requests, tokens, name)
        self.move()
        table = found.block_ids.tolist()
        for index, block in enumerate(table):
            path, num_known = (name, *tokens[: (index + 1) * B]), found.num_cached_tokens - index * B
            if num_known >= B:
                assert self.device[block] == path, "another prefix's block"
            elif num_known > 0:  # a copy of a part of another block
                assert self.device[block][: 1 + index * B + num_known] == path[: 1 + index * B + num_known]
            self.device[block] = path
        self.manager.commit(self.num_requests, tokens[found.num_cached_tokens :])
        self.manager.release(self.num_requests)
        return found.num_cached_tokens

    def num_cached(self, tokens: list[int], name: bytes) -> int:
        return self.manager.tree.look(tokens, name)[0].shape[1]

    # --- sessions ---

    def some(self) -> tuple[Session, dict[str, list[int]], str]:
        """An open session, its texts, and the name of a branch."""
        name, session_id = self.rng.choice([b"", b"x"]), self.rng.choice("abcd")
        session = self.sessions.open(session_id, name)
        alive = {(other.namespace, other.session_id) for other in self.sessions._sessions.values()}
        self.texts = {key: text for key, text in self.texts.items() if key in alive}
        texts = self.texts.setdefault((name, session_id), {MAIN: []})
        return session, texts, self.rng.choice(list(texts))

    def first(self, session: Session) -> list[int]:
        """Tokens with which all texts of a session begin, and no others."""
        return [100 + ord(session.session_id)] * B

    def tokens(self, most: int = 6) -> list[int]:
        return [self.rng.randrange(3) for _ in range(self.rng.randrange(1, most))]

    def limited(self, call: Callable[[], Any], num_tokens: int, num_branches: int = 0) -> Any:
        """Make a call that must be refused beyond the limits, and only there. Others may be closed for it.

        It may be refused, too, where an owner who has less would have to give room: an owner is a namespace.
        """
        config = self.world.config
        if num_tokens > config.max_tokens or num_branches > config.max_branches:
            with pytest.raises(ValueError, match="must be at most"):
                call()
            self.figures["refused"] += 1
            return None
        before = {key: session.state().branches for key, session in self.sessions._sessions.items()}
        try:
            return call()
        except ValueError as error:
            assert "tokens of an owner" in str(error) and any(num_tokens > self.owned(name) for name in (b"", b"x"))
            assert before == {key: session.state().branches for key, session in self.sessions._sessions.items()}
            self.figures["refused for others"] += 1
            return None

    def owned(self, name: bytes) -> int:
        return sum(session.num_tokens for key, session in self.sessions._sessions.items() if key[0] == name)

    def replaced(self, session: Session, texts: dict[str, list[int]], branch: str, path: list[int]) -> None:
        """Run a turn of a branch, and require that what gives way is what only the old path needs."""
        old, num_all = texts[branch], sum(map(len, texts.values()))
        self.request(path, session.namespace)
        released = self.limited(lambda: session.supersede(path, branch), num_all - len(old) + len(path))
        if released is None:
            return
        texts[branch] = path
        shared = max(num_common(old, other) for other in texts.values())
        assert released % B == 0 and released <= max(len(old) - shared, 0) + B
        self.figures["released"] += released
        self.evicted_first()

    def evicted_first(self) -> None:
        """Take as many device blocks as have given way, and require that nothing of the sessions' texts goes."""
        entries = [entry for entry in self.manager.tree.entries(10_000) if entry.priority < 0]
        num_blocks = sum(len(entry.block_ids) for entry in entries)
        if not num_blocks:
            return
        count = self.rng.randint(1, num_blocks) + self.manager.pool.num_free
        before = {key: self.reach(key) for key in self.texts}
        ids = self.space.take(count)
        self.move()
        self.manager.pool.release(ids)
        assert {key: self.reach(key) for key in self.texts} == before
        self.figures["evicted first"] += 1

    def reach(self, key: tuple[bytes, str]) -> list[int]:
        return [self.num_cached(text, key[0]) for text in self.texts[key].values()]

    # --- operations ---

    def turn(self) -> None:
        session, texts, branch = self.some()
        path = [*(texts[branch] or self.first(session)), *self.tokens()]
        if len(path) < B * self.world.num_blocks:
            self.replaced(session, texts, branch, path)

    def retry(self) -> None:
        session, texts, branch = self.some()
        text = texts[branch] or self.first(session)
        begin = self.rng.randint(min(B, len(text)), len(text))
        self.replaced(session, texts, branch, [*text[:begin], *self.tokens(3)])

    def edit(self) -> None:
        session, texts, branch = self.some()
        text = texts[branch]
        if len(text) <= B:
            return
        start, end = sorted(self.rng.randint(B, len(text)) for _ in range(2))
        new, mode = self.tokens(4), self.rng.choice(["exact", "erratum"])
        path = [*text, *new] if mode == "erratum" else [*text[:start], *new, *text[end:]]
        num_all = sum(map(len, texts.values())) - len(text) + len(path)
        if len(path) >= B * self.world.num_blocks:
            return
        cost = self.limited(lambda: session.edit(start, end, new, branch, mode), num_all)
        if cost is None:
            return
        texts[branch] = path
        assert (cost.num_tokens, cost.mode, cost.start, cost.end) == (len(path), mode, start, end)
        if mode == "erratum":
            assert cost.num_released_tokens == 0
        num_computed = len(path) - self.request(path, session.namespace)
        assert 0 <= num_computed - cost.num_tokens_to_compute < B, "a full pool may share no part of a block"
        self.figures[mode] += 1

    def branch(self) -> None:
        session, texts, source = self.some()
        name, count = self.rng.choice("pqr"), self.rng.randint(0, len(texts[source]))
        if name in texts:
            with pytest.raises(ValueError, match="must not be in use"):
                session.branch(name, source)
            return
        num_all = sum(map(len, texts.values())) + count
        self.limited(lambda: session.branch(name, source, count), num_all, len(texts) + 1)
        if name in session.branches:
            texts[name] = texts[source][:count]

    def release(self) -> None:
        session, texts, branch = self.some()
        released, old = session.release(branch), texts[branch]
        if branch == MAIN:
            texts[branch] = []
        else:
            del texts[branch]
        shared = max((num_common(old, other) for other in texts.values()), default=0)
        assert released <= max(len(old) - shared, 0) + B

    def close(self) -> None:
        session, _, _ = self.some()
        session.close()
        assert session.close() == 0 and not session.is_open
        with pytest.raises(RuntimeError, match="is closed"):
            session.supersede([1])
        del self.texts[session.namespace, session.session_id]

    def retain(self) -> None:
        session, texts, _ = self.some()
        tiers = ["device", "host"] if self.world.num_host_blocks else ["device"]
        num_blocks = session.retain(self.rng.choice([None, 5.0, 50.0]), self.rng.choice(tiers))
        most = sum(self.num_cached(text, session.namespace) for text in texts.values() if text)
        assert num_blocks == session.num_retained_blocks <= most
        self.figures["retained"] += num_blocks

    def pause(self) -> None:
        session, texts, branch = self.some()
        seconds, before = self.rng.choice([0.125, 3.0, 30.0]), self.reach((session.namespace, session.session_id))
        num_refused = self.sessions.stats().num_refused
        tier = session.pause(seconds)
        state = session.state()
        assert (state.paused_in, state.due_in) == (tier, seconds)
        on_host = sum(self.num_on_host(text, session.namespace) for text in texts.values() if text)
        if self.sessions.stats().num_refused == num_refused:
            assert self.reach((session.namespace, session.session_id)) == before, "a pause loses nothing"
        if not self.world.num_host_blocks or seconds < 0.5:
            assert tier == ("host" if on_host else "device")
        else:
            assert (tier == "host") == (on_host > 0)
        self.figures[f"paused: {tier}"] += 1

    def resume(self) -> None:
        session, _, _ = self.some()
        session.resume()
        assert session.state().paused_in is None

    def wait(self) -> None:
        """Time goes on. A session whose pause is about to end has its blocks on the device, if there is room."""
        self.time += self.rng.choice([0.0625, 1.0, 2.875, 29.875])
        due = [session for session in self.sessions._sessions.values() if (session.return_at or 1e9) <= self.time]
        self.sessions.tend()
        assert self.sessions.next_due > self.time
        for session in due:
            texts = [text for text in self.texts[session.namespace, session.session_id].values() if text]
            on_host = [self.num_on_host(text, session.namespace) for text in texts]
            num_cached = sum(self.num_cached(text, session.namespace) for text in texts)
            is_kept = session.num_retained_blocks == num_cached  # else others may have its blocks evicted since
            if is_kept and session.return_at is None and session.state().due_in > 0:
                assert sum(on_host) == 0
                self.figures["returned"] += 1

    def num_on_host(self, tokens: list[int], name: bytes) -> int:
        return int((self.manager.tree.look(tokens, name)[0][0] < 0).sum())

    def stranger(self) -> None:
        self.request([self.rng.randrange(4) for _ in range(self.rng.randint(1, 12))], b"stranger")

    def giant(self) -> None:
        """A prompt of all blocks: no session keeps it from running."""
        self.request([9 + self.num_requests] * (B * self.world.num_blocks), b"stranger")
        self.figures["giants"] += 1

    def demote(self) -> None:
        """The hint of a request: its path leaves for the host."""
        session, texts, branch = self.some()
        if texts[branch]:
            self.figures["demoted"] += self.space.demote(texts[branch], session.namespace)
            self.move()

    def wrong(self) -> None:
        """A refused call changes nothing."""
        session, texts, branch = self.some()
        before = session.state()
        with pytest.raises(ValueError, match="start and end must be in order"):
            session.edit(1, len(texts[branch]) + 1, [1], branch)
        with pytest.raises(KeyError, match="branch must be one of session"):
            session.supersede([1], "nobody")
        with pytest.raises(ValueError, match="expected_seconds must be positive"):
            session.pause(0.0)
        with pytest.raises(ValueError, match="without a store"):
            session.retain(1.0, "store")
        with pytest.raises(ValueError, match="num_tokens must be in"):
            session.branch("new", branch, len(texts[branch]) + 1)
        assert session.state() == before

    # --- comparing ---

    def compare(self) -> None:
        pins, config = self.space.pins, self.world.config
        assert pins.num_blocks <= self.world.quota and len(self.sessions) <= config.max_sessions
        num_tokens, owners = 0, dict[bytes, int]()
        for key, session in self.sessions._sessions.items():
            texts = self.texts.get(key, {MAIN: []})
            assert {name: session.tokens(name).tolist() for name in session.branches} == texts
            num_tokens += session.num_tokens
            owners[session.owner] = owners.get(session.owner, 0) + session.num_retained_blocks
        assert num_tokens <= config.max_tokens and self.sessions.stats().num_tokens == num_tokens
        assert config.owner_quota is None or max(owners.values(), default=0) <= config.owner_quota
        assert self.sessions.next_due == min(
            (s.return_at for s in self.sessions._sessions.values() if s.return_at is not None), default=float("inf")
        )
        self.manager.check()

    def end(self) -> None:
        for session in list(self.sessions._sessions.values()):
            session.close()
        assert len(self.space.pins) == 0 == self.manager.tree.num_matches
        self.compare()
