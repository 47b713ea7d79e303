"""Explained: mutants that no test needs to notice, since they change nothing visible. Each has its reason."""

import json
from pathlib import Path

from mutation.mutant import Mutant

FILE = Path(__file__).parents[1] / "mutations_explained.json"


class Explained:
    def __init__(self, entries: list[dict[str, str]]) -> None:
        for entry in entries:
            if set(entry) != {"file", "function", "line", "change", "why"} or not entry["why"]:
                raise ValueError(f"an entry must have file, function, line, change and why, got {entry}")
        self._why = {(e["file"], e["function"], e["line"], e["change"]): e["why"] for e in entries}

    @classmethod
    def read(cls) -> "Explained":
        return cls(json.loads(FILE.read_text()))

    def __contains__(self, mutant: Mutant) -> bool:
        return mutant.key in self._why

    def unknown(self, mutants: list[Mutant]) -> list[tuple[str, str, str, str]]:
        """Entries for these mutants' files that are of none of them: the code has changed since."""
        paths, keys = {mutant.path for mutant in mutants}, {mutant.key for mutant in mutants}
        return [key for key in self._why if key[0] in paths and key not in keys]
