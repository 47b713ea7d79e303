"""Two ranks of a model with windows of their own blocks, or with states, give the tokens of model.generate."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.state_models import SERVED
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WORK = Path(__file__).resolve().parents[2] / "support" / "rank_groups.py"
SECONDS = 300  # for a busy machine; it takes a fraction
CONFIGS = {"gemma3": "gemma3_text"}  # of types whose config has another name


def is_split(kind: str) -> bool:
    """Whether this version of transformers has a plan by which ranks share the type."""
    name = CONFIGS.get(kind, kind)
    return name in CONFIG_MAPPING and bool(CONFIG_MAPPING[name].base_model_tp_plan)


STATES = [kind for kind in ("lfm2", "qwen3_next") if kind in SERVED and is_split(kind)]  # mixers are whole, and split
WINDOWS = [kind for kind in ("cohere2", "gemma3", "gpt_oss", "mistral") if is_split(kind)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Let one process and two ranks work once; return the folder in which they leave what they have seen."""
    seen_by_ranks = tmp_path_factory.mktemp("rank_groups")
    command = [sys.executable, str(WORK), str(seen_by_ranks), *WINDOWS, *STATES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    return seen_by_ranks


def seen(folder: Path, size: int, rank: int) -> dict[str, Any]:
    of_rank: dict[str, Any] = json.loads((folder / f"seen-{size}-{rank}.json").read_text())
    return of_rank


@pytest.mark.parametrize("kind", [*WINDOWS, *STATES])
def test_two_ranks_give_what_one_gives(folder: Path, kind: str) -> None:
    """Prompts in portions, prefixes, swaps of all groups, samples, aborts, failed steps."""
    alone = seen(folder, 1, 0)
    assert alone[kind]["tokens"] == alone[f"{kind}: generate"]
    assert min(alone[kind]["counts"]) > 0
    assert seen(folder, 2, 0)[kind] == alone[kind]
    assert seen(folder, 2, 1)[kind] is None  # it ends with rank 0


@pytest.mark.parametrize("kind", [*WINDOWS, *STATES])
def test_a_store_is_refused_on_both_ranks(folder: Path, kind: str) -> None:
    rule = "num_window_blocks and several ranks, got a store"
    if kind in STATES:
        rule = "several ranks for a model whose layers keep states, "
    for rank in range(2):
        assert seen(folder, 2, rank)[f"{kind}: a store"].startswith(f"ValueError: store must be None with {rule}")
