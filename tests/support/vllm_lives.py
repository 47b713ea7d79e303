"""Lives of a real vLLM engine for tests: each in a process of its own, with a limit of time, so that nothing hangs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("vllm_engine.py")
TESTS = SCRIPT.parents[1]
LIMIT = 600
Request = tuple[list[int], int, int | None]


class Answer:
    """What came of a life. tokens, cached, seconds: one entry a request, in the order of the waves."""

    def __init__(self, values: dict[str, Any]) -> None:
        each = values["answers"]
        self.tokens = [one["tokens"] for one in each]
        self.cached = [one["cached"] or 0 for one in each]
        self.seconds = [one["seconds"] for one in each]
        self.metrics: dict[str, float] = values["metrics"]
        self.left_behind: list[str] = [name for name in values["shm_after"] if "vllm_offload" in name]

    def metric(self, name: str) -> float:
        """Return a metric's sum over its labels."""
        return sum(value for key, value in self.metrics.items() if key.split("|")[0] == f"vllm:{name}")


class Lives:
    """Starts engines. Files of each life lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_lives = folder, 0

    def live(self, model: Path, waves: list[Any], tier: dict[str, Any] | None = None, **settings: Any) -> Answer:
        """Run an engine over these waves. See vllm_engine.py for them and for the settings."""
        self.num_lives += 1
        begin = self.folder / f"life-{self.num_lives}"
        paths = begin.with_suffix(".json"), begin.with_suffix(".answer")
        paths[0].write_text(json.dumps({"model": str(model), "waves": waves, "tier": tier, **settings}))
        with begin.with_suffix(".log").open("wb") as log:
            command = [sys.executable, str(SCRIPT), *map(str, paths)]
            done = subprocess.run(command, env=_environment(), stdout=log, stderr=log, timeout=LIMIT)
        assert done.returncode == 0, begin.with_suffix(".log").read_text()[-4000:]
        return Answer(json.loads(paths[1].read_text()))

    def log(self) -> str:
        """Return what the last life has printed."""
        return (self.folder / f"life-{self.num_lives}.log").read_text()


def _environment() -> dict[str, str]:
    mine = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    return {**os.environ, **mine}
