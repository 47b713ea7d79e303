"""Results: which mutants of a file were noticed before, so that the others can be tried again. Of one source only."""

import functools
import hashlib
import json
from pathlib import Path

from mutation.mutant import Mutant

ROOT = Path(__file__).parents[3]
PLACE = ROOT / ".pytest_cache" / "reliability" / "mutation_results.json"


class Results:
    def __init__(self) -> None:
        self._killed: dict[str, list[list[str]]] = json.loads(PLACE.read_text()) if PLACE.exists() else {}

    def has(self, mutant: Mutant) -> bool:
        return list(mutant.key) in self._killed.get(_digest(mutant.path), [])

    def add(self, mutants: list[Mutant]) -> None:
        """To what the file holds by now: others may have written meanwhile."""
        self._killed = Results()._killed
        for mutant in mutants:
            if not self.has(mutant):
                self._killed.setdefault(_digest(mutant.path), []).append(list(mutant.key))
        PLACE.parent.mkdir(parents=True, exist_ok=True)
        PLACE.write_text(json.dumps(self._killed))


@functools.cache
def _digest(path: str) -> str:
    return hashlib.sha256((ROOT / path).read_bytes()).hexdigest()
