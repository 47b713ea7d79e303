"""An entry of PTX: its parameters, registers, symbols of shared memory, and instructions."""

from dataclasses import dataclass, field

from support.ptx.scalars import TYPES, width
from support.ptx.source.operands import Operand


@dataclass(frozen=True, slots=True)
class Guard:
    """The instruction runs in threads whose predicate is as wanted."""

    register: str
    wanted: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """guard: None where all threads run it. parts: the opcode and what follows it, such as ("ld", "global", "b32").

    text, location: as written, for messages.
    """

    guard: Guard | None
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    text: str
    location: str

    @property
    def opcode(self) -> str:
        return self.parts[0]

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(part for part in self.parts[1:] if part in TYPES)

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(part for part in self.parts[1:] if part not in TYPES)

    @property
    def kind(self) -> str:
        """The type that an instruction of one type works on."""
        return self.types[-1]

    def one_of(self, *names: str) -> str | None:
        """Return the first modifier among these names."""
        return next((part for part in self.modifiers if part in names), None)

    def __str__(self) -> str:
        return f"{self.text} {self.location}".strip()


@dataclass(frozen=True, slots=True)
class Parameter:
    """Bytes of the parameters, from `start` on."""

    start: int
    num_bytes: int
    kind: str


@dataclass(slots=True)
class Entry:
    """registers: their widths. labels: indices of instructions. shared_bytes: of the entry's own symbols."""

    name: str
    parameters: dict[str, Parameter] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    parameter_bytes: int = 0
    shared_bytes: int = 0

    def add_parameter(self, name: str, kind: str, count: int, alignment: int | None) -> None:
        item = width(kind) // 8
        start = aligned(self.parameter_bytes, alignment or item)
        self.parameters[name] = Parameter(start, item * count, kind)
        self.parameter_bytes = start + item * count

    def add_shared(self, name: str, num_bytes: int, alignment: int) -> None:
        start = aligned(self.shared_bytes, alignment)
        self.symbols[name] = start
        self.shared_bytes = start + num_bytes


def aligned(position: int, alignment: int) -> int:
    """Return the first multiple of the alignment from a position on."""
    return -(-position // alignment) * alignment
