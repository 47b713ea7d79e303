"""DraftedLife: a target's sequences and a draft model's beside memories of the tokens that each cell depends on."""

from dataclasses import dataclass

from support.draft_memory import DraftMemory
from support.life import Operation, ScarceLife
from support.slot_memory import SlotMemory

from kvpage import BlockManager
from kvpage.blocks.drafted_manager import DraftedManager

B = 4


def managers(num_blocks: int = 64, num_drafts: int = 64, **options: object) -> DraftedManager:
    return DraftedManager(BlockManager(num_blocks, B, **options), BlockManager(num_drafts, B, **options))


@dataclass(frozen=True, slots=True)
class DraftedWorld:
    num_blocks: int
    num_drafts: int  # blocks of the draft model

    def life(self, seed: int) -> "DraftedLife":
        return DraftedLife(managers(self.num_blocks, self.num_drafts), seed)


WORLDS = [DraftedWorld(64, 64), DraftedWorld(24, 16), DraftedWorld(14, 24)]


class DraftedLife(ScarceLife):
    """Sequences of both groups, whose cells remember the tokens that they depend on."""

    def __init__(self, manager: DraftedManager, seed: int = 0) -> None:
        super().__init__(seed)
        self.manager = manager
        self.cells, self.drafts = SlotMemory(B), DraftMemory(manager.drafts)
        self.tokens: dict[int, list[int]] = {}  # with the token that is sampled last
        self.names: dict[int, bytes] = {}
        self.next_id = 0

    def begin(self, prompt: list[int], namespace: bytes = b"") -> int:
        self.next_id += 1
        seq_id = self.next_id
        given = self.manager.allocate(seq_id, prompt, namespace)
        begin, drafted = given.num_cached_tokens, given.drafts.num_cached_tokens
        assert begin <= drafted < len(prompt), "the draft model needs the target's hidden states"
        self.cells.do(self.manager.target.take_moves())
        self.drafts.check(seq_id, prompt, namespace, drafted)
        self.check_target(seq_id, prompt, namespace, begin)
        self.tokens[seq_id], self.names[seq_id] = [*prompt, self.rng.randrange(2)], namespace
        self.compute(seq_id, begin, len(prompt), drafted, len(prompt))
        self.figures["shared"] += begin
        return begin

    def compute(self, seq_id: int, begin: int, end: int, first_draft: int, last_draft: int) -> None:
        tokens, name = self.tokens[seq_id], self.names[seq_id]
        self.cells.do(self.manager.target.take_moves())
        self.drafts.do_moves()
        slots = self.manager.target.slot_mapping(seq_id, begin, end).tolist()
        for position, slot in zip(range(begin, end), slots, strict=True):
            self.cells.device[slot] = (name, tuple(tokens[: position + 1]))
        slots = self.manager.drafts.slot_mapping(seq_id, first_draft, last_draft).tolist()
        for position, slot in zip(range(first_draft, last_draft), slots, strict=True):
            self.drafts.cells["device"][slot] = (name, tuple(tokens[: position + 2]))
        self.manager.commit(seq_id, tokens[begin:end], tokens[first_draft + 1 : last_draft + 1])

    def check_target(self, seq_id: int, tokens: list[int], namespace: bytes, end: int) -> None:
        for position, slot in enumerate(self.manager.target.slot_mapping(seq_id, 0, end).tolist()):
            assert self.cells.device[slot] == (namespace, tuple(tokens[: position + 1])), (seq_id, position)

    def check(self) -> None:
        self.cells.do(self.manager.target.take_moves())
        self.manager.check()
        for seq_id, tokens in self.tokens.items():
            self.check_target(seq_id, tokens, self.names[seq_id], len(tokens) - 1)
            self.drafts.check(seq_id, tokens, self.names[seq_id], len(tokens) - 1)

    def step(self, seq_id: int) -> None:
        """Some drafted tokens have room, some of them are accepted, and one more is sampled."""
        tokens = self.tokens[seq_id]
        num_drafted = self.rng.randrange(B + 2)
        self.manager.append([seq_id], 1 + num_drafted)
        num_new, written = 1 + self.rng.randint(0, num_drafted), len(tokens) - 1
        tokens += [self.rng.randrange(2) for _ in range(num_new)]
        self.compute(seq_id, written, written + num_new, written, written + num_new)
        self.manager.give_back_room(seq_id)
        managers = self.manager.target, self.manager.drafts
        assert [manager.state(seq_id).num_tokens for manager in managers] == [len(tokens) - 1] * 2

    def begin_any(self) -> None:
        prompt = [int(self.rng.random() < 0.1) for _ in range(self.rng.randrange(1, 5 * B))]
        self.begin(prompt, self.rng.choice([b"", b"tenant"]))

    def step_any(self) -> None:
        if self.tokens:
            self.step(self.rng.choice(list(self.tokens)))

    def release_any(self) -> None:
        if self.tokens:
            seq_id = self.rng.choice(list(self.tokens))
            self.manager.release(seq_id)
            del self.tokens[seq_id]

    def operations(self) -> dict[Operation, float]:
        return {self.begin_any: 4, self.step_any: 4, self.release_any: 3}

    def do(self, operation: Operation) -> None:
        """What is refused has changed neither group."""
        before, num_refused = self.seen(), self.figures["refused"]
        super().do(operation)
        assert self.figures["refused"] == num_refused or self.seen() == before

    def seen(self) -> object:
        return self.manager.target.stats(), self.manager.drafts.stats()

    def compare(self) -> None:
        self.check()

    def end(self) -> None:
        while self.tokens:
            self.release_any()
        self.manager.check()
        for manager in (self.manager.target, self.manager.drafts):
            assert manager.num_free_blocks == manager.num_blocks
