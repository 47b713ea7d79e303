"""Measure the backend beside SGLang's own `file`, through SGLang's controller and host pools: GB/s, medians, quartiles.

tests/integrations/run.sh sglang        makes the environment, and prints where it is
ENV/bin/python tests/integrations/sglang/measure.py FOLDER
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from integrations.sglang import real_pools  # noqa: E402
from integrations.sglang.real_pools import EngineSide, filled, mha_pool, page_of  # noqa: E402

NUM_PAGES, ROUNDS = 32, 9
BACKEND = {
    "backend_name": "kvpage", "module_path": "kvpage.integrations.sglang.backend", "class_name": "KVPageHiCache",
    "interface_v1": 1, "model": "model@1", "num_threads": 2, "deadline": 60,
}  # fmt: skip


def tiers(folder: str) -> dict[str, tuple[str, dict]]:
    return {
        "kvpage, memory": ("dynamic", {**BACKEND, "tiers": "memory://?size=512MiB"}),
        "kvpage, disk": ("dynamic", {**BACKEND, "tiers": f"disk://{folder}/kvpage?size=2GiB"}),
        "SGLang's file": ("file", {"file_storage_path": f"{folder}/file"}),
    }


def timed(call: Callable[[], int]) -> tuple[float, int]:
    start = time.perf_counter()
    done = call()
    return time.perf_counter() - start, done


def measure(layout: str, folder: str) -> None:
    pool = filled(mha_pool(layout))
    num_bytes, half = NUM_PAGES * len(page_of(pool, 0)), list(range(NUM_PAGES, 2 * NUM_PAGES))
    sides = {name: EngineSide(pool, extra, kind) for name, (kind, extra) in tiers(folder).items()}
    speeds: dict[tuple[str, str], list[float]] = {}
    for at in range(ROUNDS):
        tokens = [at * 1_000_000 + one for one in range(NUM_PAGES * real_pools.PAGE)]
        for name, side in sides.items():
            keys = side.hit(tokens).all_hash_values
            seconds, done = timed(lambda: side.keep(list(range(NUM_PAGES)), keys))  # noqa: B023
            assert done == len(tokens), (name, done)
            operation = side.hit(tokens)
            read_seconds, found = timed(lambda: side.fetch(operation, half))  # noqa: B023
            assert found == len(tokens) and page_of(pool, half[-1]) == page_of(pool, NUM_PAGES - 1)
            if at:  # the first round touches memory for the first time
                speeds.setdefault((name, "store"), []).append(num_bytes / seconds / 1e9)
                speeds.setdefault((name, "load"), []).append(num_bytes / read_seconds / 1e9)
    for (name, what), found in speeds.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{layout:18} {name:16} {what:6} {middle:5.2f} ({low:.2f}-{high:.2f}) GB/s")
    for side in sides.values():
        side.close()


def main(folder: str) -> None:
    real_pools.without_images()
    real_pools.PAGE, real_pools.LAYERS, real_pools.HEADS, real_pools.SIZE = 64, 16, 8, 128
    real_pools.NUM_PAGES = 2 * NUM_PAGES
    print(f"load {os.getloadavg()[0]:.2f}, {NUM_PAGES} pages of 4 MiB, {ROUNDS - 1} rounds in turns")
    for layout in ("page_first", "layer_first"):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            measure(layout, place)


if __name__ == "__main__":
    main(sys.argv[1])
