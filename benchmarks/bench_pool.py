"""What does a block cost to allocate and to release, the call from Python included?

Beside it, in the same run: what merely carrying the ids costs (two reads of a property, as empty native calls, and for
a batch numpy.empty with a copy of as many ids), which no pool that hands out arrays can be much below; and a free list
in plain Python. Targets: 10 ns a block in batches of 100 and more; 400 ns for one block.

    python benchmarks/bench_pool.py [--plot pool.png]
"""

import argparse
import json
import timeit

import numpy as np

from kvpage import BlockPool

NUM_BLOCKS = 1_000_000
BATCHES = [1, 10, 100, 1000, 10_000]


def best(call, number: int) -> float:
    """Nanoseconds a call, the best of several repetitions: the others had company."""
    return min(timeit.repeat(call, number=number, repeat=7)) / number * 1e9


def used_pool(seed: int) -> BlockPool:
    """A pool whose free ids are in no order, as after some hours of service."""
    pool = BlockPool(NUM_BLOCKS)
    ids = pool.allocate(NUM_BLOCKS)
    np.random.default_rng(seed).shuffle(ids)
    for part in np.array_split(ids, 1000):
        pool.release(part)
    return pool


def verify(pool: BlockPool) -> None:
    pool.check()
    ids = pool.allocate(1000)
    assert len(set(ids.tolist())) == 1000 and pool.num_free == NUM_BLOCKS - 1000
    assert all(pool.ref_count(i) == 1 for i in ids.tolist())
    pool.release(ids)
    pool.check()


def python_list(batch: int) -> float:
    free, counts = list(range(NUM_BLOCKS)), [0] * NUM_BLOCKS

    def cycle() -> None:
        ids = [free.pop() for _ in range(batch)]
        for i in ids:
            counts[i] = 1
        for i in ids:
            counts[i] -= 1
            if counts[i] == 0:
                free.append(i)

    return best(cycle, max(1, 20_000 // batch))


def measure() -> list[dict]:
    pool = used_pool(0)
    verify(pool)
    empty_call = best(lambda: pool.num_blocks, 200_000)

    def single() -> None:
        pool.release_one(pool.allocate_one())

    rows = [{"batch": "one", "ns": best(single, 200_000), "numpy_copy_ns": 2 * empty_call, "python_ns": python_list(1)}]
    for batch in BATCHES:
        ids = np.arange(batch, dtype=np.int32)
        number = max(10, 200_000 // batch)
        cycle = best(lambda n=batch: pool.release(pool.allocate(n)), number)
        copy = best(lambda ids=ids: np.copyto(np.empty(len(ids), np.int32), ids), number)
        row = {"batch": batch, "ns": cycle, "numpy_copy_ns": 2 * empty_call + copy, "python_ns": python_list(batch)}
        rows.append(row)
    for row in rows:
        row["ns_a_block"] = row["ns"] / (1 if row["batch"] == "one" else row["batch"])
    pool.check()
    return rows


def plot(rows: list[dict], path: str) -> None:
    import matplotlib.pyplot as plt

    rows = rows[1:]
    batches = [row["batch"] for row in rows]
    for key, label in (("ns", "BlockPool"), ("numpy_copy_ns", "the calls alone"), ("python_ns", "Python list")):
        plt.plot(batches, [row[key] / row["batch"] for row in rows], "o-", label=label)
    plt.axhline(10, color="gray", linestyle=":", label="target")
    plt.xscale("log")
    plt.yscale("log")
    plt.xlabel("blocks a call")
    plt.ylabel("ns a block, allocate and release")
    plt.legend()
    plt.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="PATH")
    args = parser.parse_args()
    rows = measure()
    print(f"{'batch':>8} {'ns a cycle':>12} {'ns a block':>12} {'numpy copy':>12} {'Python list':>12}")
    for row in rows:
        print(f"{row['batch']:>8} {row['ns']:12.0f} {row['ns_a_block']:12.1f} {row['numpy_copy_ns']:12.0f}"
              f" {row['python_ns']:12.0f}")  # fmt: skip
    met = rows[0]["ns"] <= 400 and all(row["ns_a_block"] <= 10 for row in rows[3:])
    if args.plot:
        plot(rows, args.plot)
    print(json.dumps({"benchmark": "pool", "rows": rows, "targets_met": met}))


if __name__ == "__main__":
    main()
