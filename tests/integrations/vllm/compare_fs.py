"""Time to the first token: computed, from vLLM's `fs` tier, and from kvpage's; each arm warm, in processes of its own.

    python tests/integrations/vllm/compare_fs.py --rounds 3

Arms take turns in each round, so that the machine's load meets all of them, and another one is the first in the next.
Tokens must be equal, or it ends with an error. It prints median and spread of milliseconds, and bytes on disk.
"""

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.vllm_lives import Answer, Lives
from support.vllm_models import make_llama

LARGE = {
    "num_hidden_layers": 16, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 4096,
    "initializer_range": 0.02,
}  # fmt: skip


def arms(folder: Path) -> dict[str, dict[str, Any] | None]:
    plugin = {"type": "KVPageTier", "module_path": "kvpage.integrations.vllm"}
    return {
        "computed": None,
        "fs": {"type": "fs", "root_dir": str(folder / "fs")},
        "kvpage disk": {**plugin, "tiers": [f"disk://{folder / 'kv'}?size=8GiB"]},
    }


def num_disk_bytes(folder: Path) -> int:
    """Return the bytes that files really take."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2049)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as opened:
        folder = Path(made)
        model, lives, each = make_llama(folder / "model", **LARGE), opened.enter_context(Lives(folder)), arms(folder)
        rng = random.Random(0)
        prompts = [[rng.randrange(10, 8000) for _ in range(given.tokens)] for _ in range(given.prompts)]
        waves = [[(tokens, 2, None)] for tokens in prompts]

        def live(tier: dict[str, Any] | None) -> Answer:
            return lives.live(model, waves, tier, host_bytes=2 << 30, llm={"max_model_len": given.tokens + 64,
                              "max_num_batched_tokens": 4096})  # fmt: skip

        expected, seconds = live(None).tokens, {name: [] for name in each}
        for name in ("fs", "kvpage disk"):
            check(name, live(each[name]), expected)
        names = list(each)
        for at in range(given.rounds):
            for name in names[at % len(names) :] + names[: at % len(names)]:
                answer = live(each[name])
                check(name, answer, expected)
                seconds[name] += answer.seconds[1:]  # the first one warms the engine up
        for name, values in seconds.items():
            times = sorted(value * 1000 for value in values)
            print(
                f"{name:12} {statistics.median(times):8.1f} ms ({times[0]:.1f} to {times[-1]:.1f}, {len(times)} values)"
            )
        for name, place in (("fs", "fs"), ("kvpage disk", "kv")):
            print(f"{name:12} {num_disk_bytes(folder / place) / 1e6:8.1f} MB on disk")
        print(f"load of the machine: {os.getloadavg()}")


def check(name: str, answer: Answer, expected: list[list[int]]) -> None:
    """Exit with an error unless the tokens are right."""
    if answer.tokens != expected:
        sys.exit(f"tokens of {name} must be those that were computed, got {answer.tokens} for {expected}")


if __name__ == "__main__":
    main()
