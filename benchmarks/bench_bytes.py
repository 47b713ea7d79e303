"""How fast is a ByteStore, beside the same blocks through `store_blocks` and `load_blocks`, and beside one copy?

The blocks of an engine's shape (Llama-3-8B: 32 layers, 8 heads, 128, bf16) go into a tier and back, at random places:
- blocks: `KVStore.store_blocks` and `load_blocks`, one chunk a record;
- pages: `ByteStore.put` and `get_into` of a `PageView` over the same tensors, the same blocks a record;
- copy: one torch copy_ of as many bytes, the bound in memory; pwrite and preadv of them, 1 MiB a call, on disk.
  All have the same number of threads.
All take turns. Records are of `--tokens` each: 2 MiB for 16 tokens. What comes back is compared bit by bit before
anything is timed. Records carry digests in both, made and checked on the way. The disk's page cache is warm.

Target: `pages` at least as fast as `blocks`.
"""

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from kvpage.benchmarks.bench_store import BLOCK_SIZE, check_loaded, halves, random_engine, speed_row
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns
from kvpage.benchmarks.pictures import bars
from kvpage.benchmarks.script import PATH, finish, option, parse
from kvpage.store import ByteStore, ByteStoreConfig, KVStore, KVStoreConfig, PageView, metadata_of

LAYERS = 32
PARTS = ("memory", "disk")
CALL_BYTES = 1 << 20
COLUMNS = (
    "{operation:<14} {tokens:>6} {GB/s:>18.2f} {of blocks:>18.2f} {of bound:>18.2f} {bound:>7} {bound GB/s:>18.2f}"
)


class Blocks:
    """One half of an engine's blocks, to be stored, and the other half, to be loaded into."""

    def __init__(self, num_tokens: int, num_records: int) -> None:
        self.num_tokens, self.each = num_tokens, num_tokens // BLOCK_SIZE
        num_blocks = self.each * num_records
        self.engine = random_engine(2 * num_blocks, LAYERS)
        self.source, self.target = halves(2 * num_blocks)
        self.tokens = np.arange(num_blocks * BLOCK_SIZE, dtype=np.int32)
        self.view = PageView(self.engine.gpu_cache, page_dim=1)
        self.num_bytes = num_blocks * self.view.page_bytes
        self.keys = [b"record %d" % number for number in range(num_records)]

    def check(self, load: Callable[[], None]) -> None:
        check_loaded(self.engine, self.source, self.target, load)


def ways(blocks: Blocks, chunks: KVStore, records: ByteStore) -> dict[str, Callable[[], None]]:
    """Return the four calls that are compared. Pages are found anew in each, as an engine does."""

    def store() -> None:
        chunks.store_blocks(blocks.tokens, blocks.engine, blocks.source, skip_existing=False)

    def load() -> None:
        assert chunks.load_blocks(blocks.tokens, blocks.engine, blocks.target) == len(blocks.tokens)

    def put() -> None:
        pages = blocks.view.pieces(blocks.source.reshape(-1, blocks.each))
        assert all(records.put(blocks.keys, pages, skip_existing=False))

    def get() -> None:
        assert all(records.get_into(blocks.keys, blocks.view.pieces(blocks.target.reshape(-1, blocks.each))))

    return {"store blocks": store, "store pages": put, "load blocks": load, "load pages": get}


def memory_bound(num_bytes: int) -> dict[str, Callable[[], object]]:
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    return {"store copy_": lambda: target.copy_(source), "load copy_": lambda: source.copy_(target)}


def disk_bound(
    num_bytes: int, folder: Path, pool: ThreadPoolExecutor, num_threads: int
) -> dict[str, Callable[[], object]]:
    """Each thread of the pool has a part of the file, as the store's threads have records."""
    data, fd = np.random.default_rng(0).bytes(num_bytes), os.open(folder / "bound", os.O_CREAT | os.O_RDWR)
    view, room = memoryview(data), memoryview(bytearray(num_bytes))
    parts = [range(0, num_bytes, CALL_BYTES)[begin::num_threads] for begin in range(num_threads)]

    def write(part: range) -> None:
        for at in part:
            os.pwrite(fd, view[at : at + CALL_BYTES], at)

    def read(part: range) -> None:
        for at in part:
            os.preadv(fd, [room[at : at + CALL_BYTES]], at)

    return {"store pwrite": lambda: list(pool.map(write, parts)), "load preadv": lambda: list(pool.map(read, parts))}


def measure(part: str, num_tokens: int, folder: Path, options: argparse.Namespace) -> list[Row]:
    blocks = Blocks(num_tokens, options.records)
    size = 2 * blocks.num_bytes + (64 << 20)
    urls = [f"disk://{folder / kind}?size={size}" if part == "disk" else f"memory://?size={size}" for kind in "ab"]
    config = KVStoreConfig(num_tokens, (urls[0],), num_threads=options.threads)
    header = {"model": "bench", "pages": blocks.view.name}
    with (
        ThreadPoolExecutor(options.threads) as pool,
        KVStore(config, metadata_of(blocks.engine, "bench")) as chunks,
        ByteStore(ByteStoreConfig((urls[1],), options.threads), header) as records,
    ):
        bounds = memory_bound(blocks.num_bytes)
        if part == "disk":
            bounds = disk_bound(blocks.num_bytes, folder, pool, options.threads)
        calls = ways(blocks, chunks, records)
        for kind in ("blocks", "pages"):
            calls[f"store {kind}"]()
            blocks.check(calls[f"load {kind}"])
        spent = in_turns({**bounds, **calls}, options.rounds)
    return [row(part, verb, num_tokens, blocks.num_bytes, spent) for verb in ("store", "load")]


def row(part: str, verb: str, num_tokens: int, num_bytes: int, spent: dict[str, list[float]]) -> Row:
    (bound,) = (name for name in spent if name.startswith(verb) and name.split()[1] not in ("blocks", "pages"))
    blocks, pages = spent[f"{verb} blocks"], spent[f"{verb} pages"]
    found = speed_row(f"{part} {verb}", num_bytes, pages, bound.split()[1], spent[bound])
    speeds = {"blocks GB/s": Figure.rate(num_bytes / 1e9, blocks), "of blocks": Figure.ratio(blocks, pages)}
    return found | speeds | {"tokens": num_tokens}


def each_result(options: argparse.Namespace) -> Iterator[Row]:
    for part, num_tokens in itertools.product(options.parts, options.tokens):
        with tempfile.TemporaryDirectory(dir=options.path) as folder:
            yield from measure(part, num_tokens, Path(folder), options)


def main() -> None:
    options = parse(
        "bytes",
        __doc__,
        rounds=21,
        threads=torch.get_num_threads(),
        tokens=option([16, 256], "of a record"),
        records=16,
        path=PATH,
        parts=option(PARTS, choices=PARTS),
    )
    results = shown(COLUMNS, each_result(options))
    shares = {f"{row['operation']}, {row['tokens']}": row["of blocks"] for row in results}
    finish(options, lambda path: bars(path, shares, "speed of pages, in that of blocks", [1.0]), results=results)


if __name__ == "__main__":
    main()
