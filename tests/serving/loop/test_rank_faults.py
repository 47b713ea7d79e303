"""Ranks that are slow go on; ranks that hang, or fail before they serve, let all others end with an error."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORK = Path(__file__).resolve().parents[2] / "support" / "rank_faults.py"
SECONDS = 300
KILLED, ENDED_BY_WATCH = -9, 70


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Let the ranks work once; return the folder in which they leave what they have seen."""
    found = tmp_path_factory.mktemp("rank_faults")
    done = subprocess.run([sys.executable, str(WORK), str(found)], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    return found


def seen(folder: Path, pair: str, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / pair / f"seen-2-{rank}.json").read_text())
    return found


def statuses(folder: Path, pair: str) -> Any:
    return json.loads((folder / pair / "statuses.json").read_text())


def test_a_rank_that_takes_longer_than_the_timeout_is_not_lost(folder: Path) -> None:
    """To be made, and to compute a step, while rank 0 asks the stores."""
    assert seen(folder, "of_rank_1", 0)["slow"] == [3, [0]]
    assert seen(folder, "of_rank_1", 0)["slow: closed"] is None
    assert seen(folder, "of_rank_1", 1)["slow"] is None


def test_rank_0_ends_if_another_hangs_in_its_store(folder: Path) -> None:
    found = seen(folder, "of_rank_1", 0)
    assert found["hung"].startswith("RankLost: ")
    assert found["hung: closed"] is None and found["hung: ended"] is None
    assert statuses(folder, "of_rank_1") == [0, KILLED]


def test_a_rank_ends_if_rank_0_hangs_in_its_store(folder: Path) -> None:
    found = seen(folder, "of_rank_0", 1)
    assert found["hung"].startswith("RankLost: ") and found["hung: ended"] is None
    assert statuses(folder, "of_rank_0") == [KILLED, 0]


def test_a_rank_ends_if_the_engine_of_rank_0_is_not_made(folder: Path) -> None:
    assert seen(folder, "of_none", 0)["unmade"] == "ArithmeticError: no memory here"
    status = statuses(folder, "of_none")
    if status != [0, ENDED_BY_WATCH]:  # amid the collective; before it, an error
        assert status == [0, 0] and seen(folder, "of_none", 1)["unmade"].startswith("RankLost: ")
