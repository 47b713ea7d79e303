"""What does sealing records cost, beside the digests that every record has?

Records of bytes go into a disk tier and come back, one thread, one record a call, with digests alone and sealed by
AES-256-GCM (kvpage/store/sealed). The files stay in the page cache: a disk would hide the cost. Times are the process's
own CPU time. Each round writes and reads every record in both ways; first, what comes back must be what was put.

Sealed records have no digests: AES-256-GCM takes their place. `aes` is that alone, frame by frame, and `digest` the
digests alone. So sealing costs the difference of the two at least, whatever else is done. `copy` is a copy of as many
bytes, memory to memory.

Target: sealed takes at most 1.3 times the CPU time of digests alone.
"""

import argparse
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, seconds
from kvpage.benchmarks.pictures import grouped
from kvpage.benchmarks.script import PATH, finish, option, parse
from kvpage.store import ByteStore, ByteStoreConfig
from kvpage.store.sealed.sealed_record import FRAME_BYTES, TAG_BYTES, new_aes
from kvpage.store.tiers.stretches import digests_of

MOST = 1.3
COLUMNS = (
    "{KiB:>7} {way:<4} {digests GB/s:>18.2f} {sealed GB/s:>18.2f} {ratio:>18.2f} {aes GB/s:>18.2f}"
    " {digest GB/s:>18.2f} {copy GB/s:>18.2f}"
)
Bytes = np.ndarray
cpu_seconds = functools.partial(seconds, clock=time.process_time)


def store_of(folder: Path, name: str, option: str, num_bytes: int) -> ByteStore:
    url = f"disk:{folder}/{name}?size={max(2 * num_bytes, 1 << 24)}{option}"
    return ByteStore(ByteStoreConfig((url,), num_threads=1), {"benchmark": "sealed"})


def sealed_alone(data: Bytes) -> Callable[[], None]:
    """Return a call of AES-256-GCM over the data."""
    aes, room = new_aes(bytes(32)), memoryview(bytearray(FRAME_BYTES + TAG_BYTES))

    def seal() -> None:
        for number, at in enumerate(range(0, data.nbytes, FRAME_BYTES)):
            frame = data[at : at + FRAME_BYTES]
            aes.encrypt_into(number.to_bytes(12, "little"), frame, None, room[: frame.nbytes + TAG_BYTES])

    return seal


def calls_of(
    stores: dict[str, ByteStore], keys: list[bytes], data: Bytes, back: Bytes
) -> dict[str, Callable[[], None]]:
    """Return calls that put all records, and that get them. data, back: [records, bytes]."""

    def put(store: ByteStore) -> None:
        for key, record in zip(keys, data, strict=True):
            store.put([key], [record], skip_existing=False)

    def get(store: ByteStore) -> None:
        for key, record in zip(keys, back, strict=True):
            assert store.get_into([key], [record]) == [True]

    return {
        f"{name} {call.__name__}": functools.partial(call, store)
        for call in (put, get)
        for name, store in stores.items()
    }


def void(result: object) -> None:
    """Take a result that is not needed."""


def measure(kib: int, options: argparse.Namespace) -> Iterator[Row]:
    data = np.random.default_rng(0).integers(0, 256, (options.records, kib << 10), dtype=np.uint8)
    back, flat = np.zeros_like(data), data.reshape(-1)
    with tempfile.TemporaryDirectory(dir=options.path) as text:
        folder = Path(text)
        (folder / "keys").write_text(f"bench {os.urandom(32).hex()}")
        ways = {"digests": "", "sealed": f"&seal_key_file={folder / 'keys'}"}
        stores = {name: store_of(folder, name, way, data.nbytes) for name, way in ways.items()}
        calls = calls_of(stores, [b"%d" % number for number in range(options.records)], data, back)
        for name, call in calls.items():
            back[:] = 0
            call()
            assert name.endswith("put") or np.array_equal(back, data), "other bytes came back"
        calls |= {"copy": lambda: np.copyto(back, data), "aes": sealed_alone(flat)}
        calls["digest"] = lambda: void(digests_of(flat, FRAME_BYTES))
        taken = in_turns(calls, options.rounds, measure=cpu_seconds)
        for store in stores.values():
            store.close()
    rates = {name: Figure.rate(data.nbytes / 1e9, times) for name, times in taken.items()}
    for way, verb in (("in", "put"), ("out", "get")):
        ratio = Figure.ratio(taken[f"sealed {verb}"], taken[f"digests {verb}"])
        speeds = {f"{name} GB/s": rates[f"{name} {verb}"] for name in ways}
        speeds |= {f"{name} GB/s": rates[name] for name in ("aes", "digest", "copy")}
        yield {"KiB": kib, "way": way, **speeds, "ratio": ratio}


def draw(rows: list[Row], path: Path) -> None:
    names = [f"{row['KiB']} KiB {row['way']}" for row in rows]
    grouped(
        path, names, {"sealed": [row["ratio"].median for row in rows]}, "times the CPU time of digests", lines=[1, MOST]
    )


def main() -> None:
    options = parse(
        "sealed",
        __doc__,
        rounds=9,
        threads=1,
        records=option(8, "of each size"),
        sizes=option([400, 1024, 4096, 8192], "KiB of a record"),
        path=PATH,
    )
    rows = shown(COLUMNS, itertools.chain.from_iterable(measure(kib, options) for kib in options.sizes))
    met = all(row["ratio"].median <= MOST for row in rows)
    finish(options, functools.partial(draw, rows), rows=rows, targets_met=met)


if __name__ == "__main__":
    main()
