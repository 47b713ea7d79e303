"""Engines over ranks: 2 and 4 processes give one process's tokens, and end with an error where one of them is lost."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORK = Path(__file__).resolve().parents[2] / "support" / "rank_work.py"
SECONDS = 300  # for a busy machine; it takes a fraction
SAME = [
    *((2, name) for name in ("llama", "qwen3", "mixtral", "deepseek_v3", "latents", "steered", "poisoned", "example")),
    *((4, name) for name in ("llama", "mixtral")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Let the ranks work once; return the folder in which they leave what they have seen."""
    found = tmp_path_factory.mktemp("ranks")
    done = subprocess.run([sys.executable, str(WORK), str(found)], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    return found


def seen(folder: Path, size: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"seen-{size}-{rank}.json").read_text())
    return found


@pytest.mark.parametrize(("size", "name"), SAME)
def test_several_ranks_give_what_one_gives(folder: Path, size: int, name: str) -> None:
    """Greedy and drawn tokens, prefix hits, swaps, branches, beams, failed requests."""
    alone = seen(folder, 1, 0)[name]
    if isinstance(alone, dict):
        assert alone["num_cached"] > 0 and alone["num_swapped"] > 0
    assert seen(folder, size, 0)[name] == alone
    assert [seen(folder, size, rank)[name] for rank in range(1, size)] == [None] * (size - 1)  # they end with rank 0


def test_tokens_come_out_of_a_store_if_every_rank_has_them(folder: Path) -> None:
    found = seen(folder, 2, 0)
    tokens, _ = seen(folder, 1, 0)["to the store"]
    assert found["to the store"] == found["out of one rank's"] == [tokens, 0]
    assert found["out of the store"][0] == tokens and found["out of the store"][1] > 0


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("size 1", "tensor_parallel_size must be 2, over which LlamaForCausalLM is sharded, got 1"),
        ("size 3", "tensor_parallel_size must be 2, over which LlamaForCausalLM is sharded, got 3"),
        ("whole model", "tensor_parallel_size must be 1, over which LlamaForCausalLM is sharded, got 2; load it by"),
        ("other configs", "config must be the same on all ranks, that of rank {other} differs"),
        ("two leads", "rank 1 must call Engine.follow, it called Engine.from_model"),
        ("a store of another rank", "the metadata of rank {rank}'s store must have world_size=2 and worker_id={rank}"),
    ],
)
def test_what_does_not_fit_together_is_refused_on_all_ranks(folder: Path, name: str, rule: str) -> None:
    for rank in range(2):
        assert seen(folder, 2, rank)[name].startswith(f"ValueError: {rule.format(rank=rank, other=1 - rank)}")


def test_an_error_of_one_rank_ends_all(folder: Path) -> None:
    first, _ = seen(folder, 2, 0)["alone"]  # the next call raises RankLost, too
    assert first.startswith("a step failed, and the ranks cannot go on: ")
    assert "the model does not like this token" in seen(folder, 2, 1)["alone"]


def test_a_rank_that_dies_ends_the_others_with_an_error(folder: Path) -> None:
    statuses = json.loads((folder / "statuses.json").read_text())
    assert statuses == {"2": [0, 0], "4": [0, 0, -9, 0]}
    assert len(seen(folder, 4, 0)["dead"]) == 2
    for rank in (1, 3):
        assert seen(folder, 4, rank)["dead"].startswith("RankLost: ")
