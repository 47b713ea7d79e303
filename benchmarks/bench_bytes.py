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
import functools
import itertools
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from kvpage.benchmarks.bench_store import BLOCK_SIZE, Calls, Moves, random_engine, speed_row
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns
from kvpage.benchmarks.pictures import bars
from kvpage.benchmarks.script import PATH, finish, option, parse
from kvpage.store import ByteStore, ByteStoreConfig, KVStore, KVStoreConfig, PageView, metadata_of

PARTS = ("memory", "disk")
CALL_BYTES = 1 << 20
COLUMNS = (
    "{operation:<14} {tokens:>6} {GB/s:>18.2f} {of blocks:>18.2f} {of bound:>18.2f} {bound:>7} {bound GB/s:>18.2f}"
)


class Pages:
    """The blocks of a store's engine, as pages of records."""

    def __init__(self, records: ByteStore, view: PageView, moves: Moves, each: int) -> None:
        self._records, self._view = records, view
        self._source, self._target = (ids.reshape(-1, each) for ids in (moves.source, moves.target))
        self._keys = [b"record %d" % number for number in range(len(self._source))]

    def put(self) -> None:
        """Store. Pages are looked for anew, as an engine does."""
        assert all(self._records.put(self._keys, self._view.pieces(self._source), skip_existing=False))

    def get(self) -> None:
        assert all(self._records.get_into(self._keys, self._view.pieces(self._target)))


def memory_bound(num_bytes: int) -> Calls:
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    return {"store copy_": lambda: target.copy_(source), "load copy_": lambda: source.copy_(target)}


def disk_bound(folder: Path, pool: ThreadPoolExecutor, num_threads: int, num_bytes: int) -> Calls:
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
    each = num_tokens // BLOCK_SIZE
    engine = random_engine(2 * each * options.records, options.layers)
    view = PageView(engine.gpu_cache, page_dim=1)
    num_bytes = each * options.records * view.page_bytes
    size = 2 * num_bytes + (64 << 20)
    urls = [f"disk://{folder / kind}?size={size}" if part == "disk" else f"memory://?size={size}" for kind in "ab"]
    config = KVStoreConfig(num_tokens, (urls[0],), num_threads=options.threads)
    header = {"model": "bench", "pages": view.name}
    with (
        ThreadPoolExecutor(options.threads) as pool,
        KVStore(config, metadata_of(engine, "bench")) as chunks,
        ByteStore(ByteStoreConfig((urls[1],), options.threads), header) as records,
    ):
        moves = Moves(chunks, engine)
        pages = Pages(records, view, moves, each)
        pages.put()
        moves.check(moves.load_blocks, pages.get)
        calls: Calls = {"store blocks": moves.store_blocks, "store pages": pages.put}
        calls |= {"load blocks": moves.load_blocks, "load pages": pages.get}
        memory, disk = memory_bound, functools.partial(disk_bound, folder, pool, options.threads)
        bounds = (disk if part == "disk" else memory)(num_bytes)
        taken = in_turns({**bounds, **calls}, options.rounds)
    return [row(part, bound, num_tokens, num_bytes, taken) for bound in bounds]


def row(part: str, name: str, num_tokens: int, num_bytes: int, taken: dict[str, list[float]]) -> Row:
    """name: of the bound, after the verb that it bounds."""
    verb, bound = name.split()
    blocks, pages = taken[f"{verb} blocks"], taken[f"{verb} pages"]
    speeds = {"blocks GB/s": Figure.rate(num_bytes / 1e9, blocks), "of blocks": Figure.ratio(blocks, pages)}
    return {**speed_row(f"{part} {verb}", num_bytes, pages, bound, taken[name]), **speeds, "tokens": num_tokens}


def results_of(options: argparse.Namespace) -> Iterator[Row]:
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
        layers=option(32, "fewer ones make smaller records"),
        path=PATH,
        parts=option(PARTS, choices=PARTS),
    )
    results = shown(COLUMNS, results_of(options))
    shares = {f"{row['operation']}, {row['tokens']}": row["of blocks"] for row in results}
    finish(options, lambda path: bars(path, shares, "speed of pages, in that of blocks", [1.0]), results=results)


if __name__ == "__main__":
    main()
