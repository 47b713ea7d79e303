"""Engines over models with states, or with windows of their own, that go on from disk, here or in another process.

python -m support.disk_engines FOLDER SEED KIND ...        prints, as JSON, the tokens and hits of each kind
"""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from support import state_engines, window_engines
from support.state_engines import B, random_prompt
from support.state_models import make_state_model
from support.window_engines import KINDS, make_window_model
from transformers import PreTrainedModel

from kvpage.store import KVStore, KVStoreConfig, metadata_of

TESTS = Path(__file__).parents[1]
NUM_TOKENS = 32
CHUNK = 2 * B
NUM_COMMON = 3 * CHUNK + 3
Served = dict[str, list[tuple[list[int], int]]]  # by kind: the tokens of each prompt, and how many of it were cached


def prompts_of(seed: int) -> list[list[int]]:
    """Three prompts that share what is no whole block, and not a token more, and one that is shorter than a chunk."""
    common = random_prompt(NUM_COMMON, seed)
    rests = [[first, *random_prompt(length, seed + length)] for first, length in ((3, 4), (5, 6), (7, 1))]
    return [*(common + rest for rest in rests), common[: CHUNK - 3]]


def serve(folder: Path, seed: int, kinds: list[str]) -> Served:
    """Serve the prompts of each kind, one after the other, with a store of its own in the folder."""
    served: Served = {}
    for kind in kinds:
        model, engines = _model_of(kind)
        engine = engines.make_engine(model, load_or_compute=False)
        tier = f"disk://{folder / kind}?size=16MiB&segment=8MiB"
        with KVStore(KVStoreConfig(CHUNK, (tier,)), metadata_of(engine.cache, kind)) as store:
            engine.use_store(store)
            served[kind] = [engines.ask(engine, prompt, NUM_TOKENS) for prompt in prompts_of(seed)]
            engine.close()
            assert store.stats().corrupt_records == 0
        engines.check_nothing_held(engine)
    return served


def _model_of(kind: str) -> tuple[PreTrainedModel, ModuleType]:
    return (make_window_model(kind), window_engines) if kind in KINDS else (make_state_model(kind), state_engines)


def serve_elsewhere(folder: Path, seed: int, kinds: list[str]) -> Served:
    """Do as `serve`, in a process of its own."""
    command = [sys.executable, "-m", "support.disk_engines", str(folder), str(seed), *kinds]
    printed = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True).stdout
    served = json.loads(printed.splitlines()[-1])
    return {kind: [(tokens, num_cached) for tokens, num_cached in each] for kind, each in served.items()}


if __name__ == "__main__":
    print(json.dumps(serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
