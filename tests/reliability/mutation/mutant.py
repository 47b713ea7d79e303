"""Mutant: one small change of a source file that some test should notice."""

from collections import Counter
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Mutant:
    """path: of the file, from the root. text: its line, without margins. change: such as "< becomes <="."""

    path: str
    line: int
    function: str
    text: str
    change: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What it is explained under: not the line's number, which other changes move."""
        return self.path, self.function, self.text, self.change

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: {self.change}: {self.text}"


def numbered(mutants: list[Mutant]) -> list[Mutant]:
    """Each with a key of its own: the second of the same change in the same line says so."""
    seen: Counter[tuple[str, str, str, str]] = Counter()
    made = []
    for mutant in mutants:
        seen[mutant.key] += 1
        num = seen[mutant.key]
        made.append(mutant if num == 1 else replace(mutant, change=f"{mutant.change} ({num})"))
    return made
