"""Time to the first token from vLLM's `fs` tier and from kvpage's, in a second process, and bytes on disk.

    python tests/integrations/vllm/compare_fs.py --rounds 5

For each length, one process stores prompts in each tier. Then the tiers take turns, each in a warm process of its own,
and another one is the first in each round. Tokens must be those that were computed, or it ends with an error.
It prints medians and ranges of milliseconds to the first token, and bytes on disk.
"""

import argparse
import contextlib
import os
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.vllm_lives import Answer, Lives
from support.vllm_models import make_llama

TALL = {
    "num_hidden_layers": 16, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 16384,
    "initializer_range": 0.02,
}  # fmt: skip
TOKEN_BYTES = 16 * 2 * 8 * 64 * 4  # layers, K and V, heads, numbers, bytes of a number
BLOCK = 128


def arms(folder: Path) -> dict[str, dict[str, Any]]:
    plugin = {"type": "KVPageTier", "module_path": "kvpage.integrations.vllm"}
    return {
        "fs": {"type": "fs", "root_dir": str(folder / "fs")},
        "kvpage": {**plugin, "tiers": [f"disk://{folder / 'kvpage'}?size=8GiB"]},
    }


def num_disk_bytes(folder: Path) -> int:
    """Return the bytes that files really take."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


class Comparison:
    """Both tiers at one length of prompts. Files are under `folder`."""

    def __init__(self, lives: Lives, model: Path, folder: Path, num_tokens: int, num_prompts: int) -> None:
        rng = random.Random(num_tokens)
        self._lives, self._model, self._folder, self.num_tokens = lives, model, folder, num_tokens
        self._waves = [[([rng.randrange(10, 8000) for _ in range(num_tokens)], 2, None)] for _ in range(num_prompts)]
        self._arms = arms(folder)
        self.seconds: dict[str, list[float]] = {name: [] for name in ("computed", *self._arms)}
        self.num_dropped = 0  # chunks that kvpage was given, and did not store
        answer = self._live(None)
        self._expected, self.seconds["computed"] = answer.tokens, answer.seconds
        for name in self._arms:
            self._checked(name)

    def round(self, number: int) -> None:
        """Let each tier serve the prompts in a process of its own."""
        names = list(self._arms)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            answer = self._checked(name)
            self.seconds[name] += answer.seconds[1:]  # the first one warms the engine up

    def print(self) -> None:
        """Print the figures."""
        for name, values in self.seconds.items():
            print(f"{self.num_tokens:6} tokens, first token, {name:9} {_shown(values)}")
        print(f"{self.num_tokens:6} tokens, chunks that kvpage did not store: {self.num_dropped}")
        num_bytes = len(self._waves) * self.num_tokens // BLOCK * BLOCK * TOKEN_BYTES
        for name in self._arms:
            num = num_disk_bytes(self._folder / name)
            print(f"{self.num_tokens:6} tokens, disk, {name:9} {num / 1e6:8.1f} MB, {num / num_bytes:.3f} of K and V")

    def _live(self, tier: dict[str, Any] | None) -> Answer:
        settings = {"max_model_len": self.num_tokens + 64, "max_num_batched_tokens": 4096}
        return self._lives.live(self._model, self._waves, tier, host_bytes=2 << 30, llm=settings)

    def _checked(self, name: str) -> Answer:
        """Return a life's answer. Exit with an error unless its tokens are right."""
        answer = self._live(self._arms[name])
        if answer.tokens != self._expected:
            sys.exit(f"tokens of {name} must be those that were computed, got {answer.tokens} for {self._expected}")
        self.num_dropped += int(answer.metric("kvpage_dropped_stores"))
        return answer


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2049, 8193])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as opened:
        folder = Path(made)
        model, lives = make_llama(folder / "model", **TALL), opened.enter_context(Lives(folder))
        for num_tokens in given.tokens:
            place = folder / str(num_tokens)
            place.mkdir()
            comparison = Comparison(lives, model, place, num_tokens, given.prompts)
            for number in range(given.rounds):
                comparison.round(number)
            comparison.print()
            shutil.rmtree(place)
        print(f"load of the machine: {os.getloadavg()}")


def _shown(seconds: list[float]) -> str:
    times = sorted(value * 1000 for value in seconds)
    return f"{statistics.median(times):9.1f} ms ({times[0]:.1f} to {times[-1]:.1f}, {len(times)} values)"


if __name__ == "__main__":
    main()
