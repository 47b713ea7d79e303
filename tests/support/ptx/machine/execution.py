"""Runs a batch of thread blocks in lockstep: of all threads, those that are the least far in the program go on.

So warps come together again wherever the program is structured. A branch ends a run of instructions, and a label begins
one; between them the same threads go on together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from support.ptx.machine.threads import WARP, Step, Threads
from support.ptx.scalars import PtxError
from support.ptx.source.operands import Label, Operand
from support.ptx.source.program import Entry, Guard, Instruction

MAX_RUNS = 2**20  # of instructions without a branch
Pick = Callable[[np.ndarray], int]  # which of the warps that can run goes on


@dataclass(frozen=True, slots=True)
class Program:
    """An entry, made ready to run. steps: None for what moves threads about. leaders: where a run of steps begins."""

    entry: Entry
    steps: Sequence[Step | None]
    leaders: frozenset[int]

    @staticmethod
    def of(entry: Entry, build: Callable[[Instruction], Step]) -> "Program":
        leaders = set(entry.labels.values())
        steps: list[Step | None] = []
        for i, instruction in enumerate(entry.instructions):
            moves = _moves(instruction)
            steps.append(None if moves else build(instruction))
            leaders |= {i, i + 1} if moves else set()
        return Program(entry, steps, frozenset(leaders))


def _moves(instruction: Instruction) -> bool:
    waits = instruction.opcode in ("bar", "barrier") and "warp" not in instruction.parts
    return waits or instruction.opcode in ("bra", "ret", "exit")


class Execution:
    """next: each thread's next instruction. pick: chooses one warp to go on; without it all that are least far do."""

    def __init__(self, program: Program, threads: Threads, pick: Pick | None = None) -> None:
        self.program, self.threads, self.pick = program, threads, pick
        self.next = np.zeros(threads.count, np.int64)
        self.alive = np.ones(threads.count, bool)
        self.waits = np.zeros(threads.count, bool)

    def run(self) -> None:
        """Raises:
        PtxError: a thread does what a device would not do as written, or goes on for ever.
        """
        with np.errstate(all="ignore"):
            for _ in range(MAX_RUNS):
                if not self.alive.any():
                    return
                self.advance(self.chosen(self.alive & ~self.waits))
        raise PtxError(f"threads do not end: {MAX_RUNS} runs of instructions are done")

    def chosen(self, runs: np.ndarray) -> np.ndarray:
        """Return the threads that go on, all at the same instruction."""
        if self.pick is not None:
            warps = np.unique(np.nonzero(runs)[0] // WARP)
            runs = runs & (np.arange(len(runs)) // WARP == self.pick(warps))
        return np.nonzero(runs & (self.next == self.next[runs].min()))[0]

    def advance(self, indices: np.ndarray) -> None:
        """Run instructions in these threads, up to where they part or meet others."""
        program, threads = self.program, self.threads
        lanes = slice(None) if len(indices) == threads.count else indices
        position = int(self.next[indices[0]])
        while position < len(program.steps):
            step, instruction = program.steps[position], program.entry.instructions[position]
            if step is None:
                self.move(instruction, position, indices)
                return
            some = lanes if instruction.guard is None else self.guarded(instruction.guard, indices)
            if isinstance(some, slice) or len(some):
                step(threads, some)
            position += 1
            if position in program.leaders:
                break
        self.next[indices] = position
        self.alive[indices] = position < len(program.steps)

    def guarded(self, guard: Guard, indices: np.ndarray) -> np.ndarray | slice:
        holds = _holds(self.threads, guard, indices)
        return slice(None) if len(holds) == self.threads.count and holds.all() else indices[holds]

    def move(self, instruction: Instruction, position: int, indices: np.ndarray) -> None:
        """Branch, leave, or wait."""
        taken = indices if instruction.guard is None else indices[_holds(self.threads, instruction.guard, indices)]
        self.next[indices] = position + 1
        if instruction.opcode == "bra":
            self.next[taken] = self.program.entry.labels[_target(instruction.operands[0])]
        elif instruction.opcode in ("ret", "exit"):
            self.alive[taken] = False
        else:
            self.wait(instruction, taken)
        self.release()

    def wait(self, instruction: Instruction, indices: np.ndarray) -> None:
        if len(instruction.operands) != 1 or "sync" not in instruction.parts:
            raise PtxError(f"not supported: a barrier of some threads: {instruction}")
        self.waits[indices] = True
        warps = np.unique(indices // WARP)
        together = (self.waits | ~self.alive).reshape(-1, WARP)[warps]
        if not together.all():
            raise PtxError(f"a warp is not together: {instruction}")

    def release(self) -> None:
        """Let the blocks go on whose threads have all come to the barrier, or left."""
        size = self.threads.batch.block_size
        waits = self.waits.reshape(-1, size)
        done = (waits | ~self.alive.reshape(-1, size)).all(1) & waits.any(1)
        if done.any():
            waits[done] = False
            self.threads.clock.order_blocks(np.nonzero(np.repeat(done, size))[0] + self.threads.first_thread)


def _holds(threads: Threads, guard: Guard, indices: np.ndarray) -> np.ndarray:
    return threads.register(guard.register)[indices] == guard.wanted


def _target(operand: Operand) -> str:
    assert isinstance(operand, Label)
    return operand.name
