"""How near does a store come to copying, writing, reading and sending as many bytes, from an engine's blocks and back?

Bounds, measured in the same run and in turn with what they bound, with as many threads, each taking whole chunks:
- memory tier: one torch copy_ of as many bytes. Its tensors are in the small pages that torch asks for, the engine's
  host blocks in huge ones (kvpage/layout/host_memory.py). This is part of why a store is faster than a copy. "equal
  pages" compares with a copy_ between tensors in huge pages;
- tensors: the same copy_, of K and V in one tensor. "retrieve" gives them back in the store's memory, "out" writes into
  the caller's. "first store" is that into a tier just opened, whose memory was taken then; "prefault=no" leaves it to
  the store;
- disk tier, page cache warm: pwrite of as many distinct bytes (random, 32 MiB a chunk, so that they come out of memory
  and not out of the processor's cache; in huge pages, too) into a preallocated file in calls of 32 MiB, and preadv into
  as much room, in huge pages and written before (into small pages it is four times as slow). The tier writes a chunk
  from blocks of 32 KiB, a MiB at a time, and makes its digests. "gathered" is
  beside a bound that gathers too: pwritev of the very blocks, from where they are, a chunk a call, without digests.
  With one thread, a fifth of a store is hashing and a seventh what Python does between two chunks; with two threads
  these hide behind the other's writes;
- redis, on this machine over loopback: redis-py's own SET and GET of values of 32 MiB, ready made; needs redis-server;
- a lookup: hashlib's SHA-256 over as many int64 tokens.
Without a bound: "small" are the calls that a record of 8 KB takes in a full disk tier, "opening" is that of a disk tier
of 100 GiB, whose headers are real and whose files are sparse.
Records carry xxh3-128 digests, made and checked on the way. "layers" is load_layers, all layers awaited. A miss is
`lookup` and `load_blocks` of a prompt that no tier has. The shape is Llama-3-8B's: 32 layers, 8 heads, 128, bf16; a
chunk of 256 tokens is 32 MiB; blocks are taken at random. What comes back is compared bit by bit before anything is
timed. The least time of several counts: others may use the machine.

Targets: memory at least 0.85 of copy_, tensors 0.95 into given memory and 0.8 without, disk 0.8 of pwrite and preadv,
redis 0.8 of redis-py, a lookup of 16k tokens within 100 us of SHA-256, a miss under 1 ms, opening under a second.
"""

import argparse
import hashlib
import operator
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from kvpage import CacheConfig, CacheEngine, ModelConfig
from kvpage.benchmarks.cells import Row, fill
from kvpage.benchmarks.figure import Figure, in_turns, seconds
from kvpage.benchmarks.pictures import bars
from kvpage.benchmarks.script import PATH, finish, option, parse
from kvpage.layout import host_memory
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata, metadata_of
from kvpage.store.disk.disk_tier import SEGMENT_BYTES, SLOT_BYTES, DiskTier
from kvpage.store.disk.segment import HEADER_BYTES, Run, Segment

BLOCK_SIZE, CHUNK_SIZE, LAYERS = 16, 256, 32
CHUNK_BYTES = LAYERS * 2 * CHUNK_SIZE * 8 * 128 * 2
LOOKUP_TOKENS = 16384
FULL_BYTES, FULL_RECORD = 100 << 30, 32 << 20  # of the tier that is opened
SMALL_TIER, SMALL_RECORD = 64 << 20, 8000
CALL = "{operation:<28} {us:.1f} us"
TIME = "{operation:<28} {us:.0f} us, {over us:.0f} us over {bound}, {bound us:.0f} us"
SPEED = "{operation:<28} {GB/s:.2f} GB/s, {of bound:.2f} of {bound}, {bound GB/s:.2f} GB/s"
Calls = dict[str, Callable[[], object]]
PARTS = ("memory", "tensors", "disk", "redis", "lookups", "small", "opening")


def random_engine(num_blocks: int, num_layers: int) -> CacheEngine:
    """Return an engine with random K and V in all of its blocks."""
    model = ModelConfig(128, 8, ("full_attention",) * num_layers, torch.bfloat16)
    engine = CacheEngine(CacheConfig(BLOCK_SIZE, num_blocks), model)
    for cache in engine.gpu_cache:
        cache.view(torch.int16).random_()
    return engine


def halves(num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of two halves of the blocks, in random order."""
    ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    source, target = ids.chunk(2)
    return source, target


class Moves:
    """A prompt between one half of an engine's blocks, the store, and the other half."""

    def __init__(self, store: KVStore, engine: CacheEngine) -> None:
        self.store, self.engine = store, engine
        self.source, self.target = halves(engine.gpu_cache[0].shape[1])
        self.tokens = np.arange(len(self.source) * BLOCK_SIZE, dtype=np.int32)

    def store_blocks(self) -> None:
        self.store.store_blocks(self.tokens, self.engine, self.source, skip_existing=False)

    def load_blocks(self) -> None:
        assert self.store.load_blocks(self.tokens, self.engine, self.target) == len(self.tokens)

    def load_layers(self) -> None:
        with self.store.load_layers(self.tokens, self.engine, self.target) as load:
            assert load.result() == len(self.tokens)

    def check(self, *loads: Callable[[], object]) -> None:
        """Store, and compare every bit that each of these loads."""
        self.store_blocks()
        for load in loads:
            for cache in self.engine.gpu_cache:
                cache[:, self.target.long()] = 0
            load()
            for cache in (cache.view(torch.int16) for cache in self.engine.gpu_cache):
                assert torch.equal(cache[:, self.source.long()], cache[:, self.target.long()]), "not what was stored"


def measure(
    url: str,
    engine: CacheEngine,
    bounds: Calls,
    options: argparse.Namespace,
    others: Mapping[str, tuple[str, str]] = {},
) -> list[Row]:
    """Return the rows of a tier. bounds: of store, of retrieve, and others. others: by operation, it and its bound."""
    num_bytes, (tier, _, _) = options.chunks * CHUNK_BYTES, url.partition(":")
    with KVStore(store_config(url, options), metadata_of(engine, "bench")) as store:
        moves = Moves(store, engine)
        moves.check(moves.load_blocks, moves.load_layers)
        calls: Calls = {"store": moves.store_blocks, "retrieve": moves.load_blocks, "layers": moves.load_layers}
        taken = in_turns({**bounds, **calls}, options.rounds)
    write, read, *_ = bounds
    rows = {"store": ("store", write), "retrieve": ("retrieve", read), "layers": ("layers", read), **others}
    return [
        speed_row(f"{tier} {name}", num_bytes, taken[of], bound.partition(",")[0], taken[bound])
        for name, (of, bound) in rows.items()
    ]


def store_config(url: str, options: argparse.Namespace) -> KVStoreConfig:
    return KVStoreConfig(CHUNK_SIZE, (url,), num_threads=options.threads)


def speed_row(operation: str, num_bytes: int, taken: list[float], bound: str, limit: list[float]) -> Row:
    """Return the row of an operation that moves so many bytes. limit: the seconds of its bound."""
    return {
        "operation": operation,
        "GB/s": Figure.rate(num_bytes / 1e9, taken),
        "bound": bound,
        "bound GB/s": Figure.rate(num_bytes / 1e9, limit),
        "of bound": Figure.ratio(limit, taken),
    }


def memory(engine: CacheEngine, options: argparse.Namespace) -> list[Row]:
    source = torch.randint(0, 255, (options.chunks * CHUNK_BYTES,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    huge = [host_memory.zeros([options.chunks * CHUNK_BYTES], torch.uint8) for _ in range(2)]
    huge[0].copy_(source)
    bounds: Calls = {
        "copy_": lambda: target.copy_(source),
        "copy_ back": lambda: source.copy_(target),
        "copy_, equal pages": lambda: huge[1].copy_(huge[0]),
        "copy_ back, equal pages": lambda: huge[0].copy_(huge[1]),
    }
    others = {"store, equal pages": ("store", "copy_, equal pages")}
    others["retrieve, equal pages"] = ("retrieve", "copy_ back, equal pages")
    return measure(f"memory://?size={(options.chunks + 1) * 2 * CHUNK_BYTES}", engine, bounds, options, others)


def tensors(options: argparse.Namespace) -> list[Row]:
    """Measure the calls that take and give tensors."""
    kv = torch.empty(LAYERS, 2, options.chunks * CHUNK_SIZE, 8, 128, dtype=torch.bfloat16)
    kv.view(torch.int16).random_()
    tokens, out, target = np.arange(options.chunks * CHUNK_SIZE, dtype=np.int32), torch.zeros_like(kv), kv.clone()
    url = f"memory://?size={2 * (options.chunks + 1) * CHUNK_BYTES}"
    metadata = KVStoreMetadata("bench", kv_dtype=kv.dtype)

    def first_store(url: str) -> float:
        with KVStore(store_config(url, options), metadata) as store:
            return seconds(lambda: store.store(tokens, kv))

    with KVStore(store_config(url, options), metadata) as store:
        store.store(tokens, kv)
        assert torch.equal(store.retrieve(tokens, return_tuple=False)[0].view(torch.int16), kv.view(torch.int16))
        store.retrieve(tokens, out=out)
        assert torch.equal(out.view(torch.int16), kv.view(torch.int16)), "not what was stored"
        calls: Calls = {
            "copy_": lambda: target.copy_(kv),
            "store": lambda: store.store(tokens, kv, skip_existing=False),
            "retrieve": lambda: store.retrieve(tokens),
            "out": lambda: store.retrieve(tokens, out=out),
        }
        taken = in_turns(calls, options.rounds)
    for name, place in (("first store", url), ("first store, prefault=no", f"{url}&prefault=no")):
        taken[name] = [first_store(place) for _ in range(options.rounds)]
    copy = taken.pop("copy_")
    return [speed_row(f"tensors {name}", kv.nbytes, spent, "copy_", copy) for name, spent in taken.items()]


def block_views(engine: CacheEngine) -> list[list[memoryview]]:
    """Return the places of each chunk's blocks, in the order of its payload."""
    source, _ = halves(engine.gpu_cache[0].shape[1])
    layers = [cache.view(torch.uint8).flatten(2).numpy() for cache in engine.gpu_cache]
    tables = source.reshape(-1, CHUNK_SIZE // BLOCK_SIZE).tolist()
    return [[part[block].data for layer in layers for part in layer for block in table] for table in tables]


def disk(engine: CacheEngine, folder: Path, options: argparse.Namespace) -> list[Row]:
    random = np.random.default_rng(0).integers(0, 256, options.chunks * CHUNK_BYTES, dtype=np.uint8)
    data = host_memory.zeros([len(random)], torch.uint8).copy_(torch.from_numpy(random)).numpy().data
    rooms = [host_memory.zeros([CHUNK_BYTES], torch.uint8).fill_(1).numpy().data for _ in range(options.chunks)]
    views, places = block_views(engine), range(0, len(data), CHUNK_BYTES)
    fd = os.open(folder / "plain", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, options.chunks * CHUNK_BYTES)
    size = 3 * (options.chunks + 2) * CHUNK_BYTES
    with ThreadPoolExecutor(options.threads) as pool:
        bounds: Calls = {
            "pwrite": lambda: list(pool.map(lambda at: os.pwrite(fd, data[at : at + CHUNK_BYTES], at), places)),
            "preadv": lambda: list(pool.map(lambda room, at: os.preadv(fd, [room], at), rooms, places)),
            "pwritev": lambda: list(pool.map(lambda parts, at: os.pwritev(fd, parts, at), views, places)),
        }
        bounds["pwrite"]()
        url = f"disk://{folder}/tier?size={size}&segment={size}"
        rows = measure(url, engine, bounds, options, {"gathered": ("store", "pwritev")})
    os.close(fd)
    return rows


def remote(engine: CacheEngine, options: argparse.Namespace) -> list[Row]:
    """Values that redis-py is given are as long as the payloads; it makes no digests of them."""
    try:
        import redis

        from kvpage.benchmarks.bench_store_redis import redis_server
    except ImportError as error:
        print(f"redis: skipped, {error}")
        return []
    if shutil.which("redis-server") is None:
        print("redis: skipped, there is no redis-server")
        return []
    values = {f"peer:{n}": np.random.default_rng(n).bytes(CHUNK_BYTES) for n in range(options.chunks)}
    with redis_server() as (_, port), ThreadPoolExecutor(options.threads) as pool:
        peer = redis.Redis(port=port)

        def read() -> None:
            assert all(pool.map(lambda name: len(peer.get(name) or b"") == CHUNK_BYTES, values))

        bounds: Calls = {"SET": lambda: list(pool.map(peer.set, values, values.values())), "GET": read}
        bounds["SET"]()
        return measure(f"redis://127.0.0.1:{port}/0?deadline=60", engine, bounds, options)


def lookups(options: argparse.Namespace) -> list[Row]:
    """Measure keys alone: the stored chunks are those of an engine of one small layer."""
    small = CacheEngine(CacheConfig(BLOCK_SIZE, LOOKUP_TOKENS // BLOCK_SIZE), ModelConfig(8, 1, ("full_attention",)))
    for cache in small.gpu_cache:
        cache.zero_()
    tokens, absent = np.arange(LOOKUP_TOKENS, dtype=np.int32), np.arange(1, LOOKUP_TOKENS + 1, dtype=np.int32)
    data = tokens.astype("<i8").tobytes()
    ids = np.arange(LOOKUP_TOKENS // BLOCK_SIZE)
    with KVStore(store_config("memory://?size=64MiB", options), metadata_of(small, "bench")) as store:
        store.store_blocks(tokens, small, ids)
        assert (store.lookup(tokens), store.lookup(absent)) == (LOOKUP_TOKENS, 0)
        assert store.load_blocks(absent, small, ids) == 0
        calls: Calls = {
            "SHA-256": lambda: hashlib.sha256(data).digest(),
            "lookup 16k": lambda: store.lookup(tokens),
            "miss: lookup 16k": lambda: store.lookup(absent),
            "miss: load_blocks 16k": lambda: store.load_blocks(absent, small, ids),
        }
        taken = in_turns(calls, 40 * options.rounds)
    floor = taken.pop("SHA-256")
    bound = {"bound": "SHA-256", "bound us": Figure.of(floor, 1e6)}
    return [
        {"operation": name, "us": Figure.of(spent, 1e6), **bound,
         "over us": Figure.of(map(operator.sub, spent, floor), 1e6)}
        for name, spent in taken.items()
    ]  # fmt: skip


def small_records(folder: Path, options: argparse.Namespace) -> list[Row]:
    """Measure each call of a tier that is full: every create evicts."""
    tier, data = DiskTier([folder / "small"], SMALL_TIER), bytes(SMALL_RECORD)
    num_records, times = SMALL_TIER // SLOT_BYTES, list[tuple[float, float, float]]()
    for number in range(num_records + 1000 * options.rounds):
        key, before = hashlib.sha256(b"%d" % number).digest(), time.perf_counter()
        writer = tier.create(key, len(data))
        created = time.perf_counter()
        assert writer is not None
        with writer:
            writer.piece(0, len(data))[:] = data
            tier.commit([writer])
        committed = time.perf_counter()
        (reader,) = tier.open([key])
        assert reader is not None
        reader.close()
        times.append((created - before, committed - created, time.perf_counter() - committed))
    assert tier.stats().evicted > num_records // 2
    tier.close()
    columns = zip(*times[num_records:], strict=True)
    names = ("create", "fill and commit", "open and close")
    return [
        {"operation": f"{name}, 8 KB", "us": Figure.of(spent, 1e6)} for name, spent in zip(names, columns, strict=True)
    ]


def opening(folder: Path) -> list[Row]:
    """Measure the opening of segments that are full of large records, as their headers say; their bytes are holes."""
    num_slots, number, tier_folder = SEGMENT_BYTES // SLOT_BYTES, 0, folder / "full"
    tier_folder.mkdir()
    (tier_folder / "lock").touch()
    with mock.patch.object(os, "posix_fallocate", lambda fd, offset, size: os.ftruncate(fd, offset + size)):
        for file in range(FULL_BYTES // SEGMENT_BYTES):
            segment = Segment.create(tier_folder / f"{file:04}.segment", SLOT_BYTES, num_slots, num_slots)
            slot, count = 1, segment.slots_for(FULL_RECORD - HEADER_BYTES)
            while slot + count <= num_slots:
                number += 1
                key = hashlib.sha256(b"%d" % number).digest()
                segment.mark(Run(slot, count, number, FULL_RECORD - HEADER_BYTES, time.time(), key))
                slot += count
            if slot < num_slots:
                segment.mark(Run(slot, num_slots - slot))
            segment.close()
    times = []
    for _ in range(5):
        before = time.perf_counter()
        tier = DiskTier([tier_folder], None)
        times.append(time.perf_counter() - before)
        assert tier.stats().num_records == number
        tier.close()
    return [{"operation": f"open {FULL_BYTES >> 30} GiB", "records": number, "us": Figure.of(times, 1e6)}]


def main() -> None:
    options = parse(
        "store",
        __doc__,
        rounds=9,
        threads=torch.get_num_threads(),
        chunks=8,
        path=PATH,
        parts=option(PARTS, choices=PARTS),
    )
    engine, results = random_engine(2 * options.chunks * CHUNK_SIZE // BLOCK_SIZE, LAYERS), list[Row]()
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        calls = {
            "memory": lambda: memory(engine, options),
            "tensors": lambda: tensors(options),
            "disk": lambda: disk(engine, Path(folder), options),
            "redis": lambda: remote(engine, options),
            "lookups": lambda: lookups(options),
            "small": lambda: small_records(Path(folder), options),
            "opening": lambda: opening(Path(folder)),
        }
        for name in options.parts:
            for row in calls[name]():
                results.append(row)
                print(fill(TIME if "over us" in row else CALL if "us" in row else SPEED, row), flush=True)
    shares = {row["operation"]: row["of bound"] for row in results if "of bound" in row}
    label = "speed, in copy_, pwrite, preadv, SET and GET of as many bytes"
    finish(options, lambda path: bars(path, shares, label, [0.85]), results=results)


if __name__ == "__main__":
    main()
