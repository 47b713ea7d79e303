"""Lives of a real vLLM engine for tests: each in a process of its own, with a limit of time, so that nothing hangs."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from subprocess import PIPE
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
        self.left_behind: list[str] = values["left_behind"]  # shared memory

    def metric(self, name: str) -> float:
        """Return a metric's sum over its labels."""
        return sum(value for key, value in self.metrics.items() if key.split("|")[0] == f"vllm:{name}")


class Lives:
    """Starts engines. Files of each life lie in `folder`. Use it in `with`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_lives = folder, 0
        self._log = (folder / "starter.log").open("wb")
        self._starter = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env=_environment(),
            stdin=PIPE,
            stdout=PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> "Lives":
        return self

    def __exit__(self, *_: object) -> None:
        self._starter.stdin.close()
        self._starter.wait(LIMIT)
        self._starter.stdout.close()
        self._log.close()

    def live(self, model: Path, waves: list[Any], tier: dict[str, Any] | None = None, **settings: Any) -> Answer:
        """Run an engine over these waves. See vllm_engine.py for them and for the settings."""
        self.num_lives += 1
        begin = self.folder / f"life-{self.num_lives}"
        values = {"model": str(model), "waves": waves, "tier": tier, **settings}
        begin.with_suffix(".json").write_text(json.dumps(values))
        self._starter.stdin.write(f"{begin}\n")
        pid = int(self._starter.stdout.readline())
        guard = threading.Timer(LIMIT, os.killpg, (pid, signal.SIGKILL))  # it hangs: its status says so
        guard.start()
        status = int(self._starter.stdout.readline())
        guard.cancel()
        assert status == 0, f"status {status}: {self.log()[-4000:]}"
        return Answer(json.loads(begin.with_suffix(".answer").read_text()))

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
