"""What does sealing records cost, beside the digests that every record has?

Records of bytes go into a disk tier and come back, one thread, one record a call, with digests alone and sealed by
AES-256-GCM (kvpage/store/sealed). The files stay in the page cache: a disk would hide the cost. Times are the process's
own CPU time. Each round writes and reads every record in both ways; first, what comes back must be what was put.

Sealed records have no digests: AES-256-GCM takes their place. `aes` is that alone, frame by frame, and `digest` the
digests alone. So sealing costs the difference of the two at least, whatever else is done. `copy` is a copy of as many
bytes, memory to memory. `system` writes them to a file, or reads them from it, in pieces of 1 MiB. `least` is the ratio
if nothing but `system` and `aes` were done.

`two` is the time on the clock of a call with all sealed records, two threads against one.

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
    " {digest GB/s:>18.2f} {copy GB/s:>18.2f} {system GB/s:>18.2f} {least:>18.2f} {two:>18.2f}"
)
PIECE_BYTES = 1 << 20
Bytes = np.ndarray
cpu_seconds = functools.partial(seconds, clock=time.process_time)


def store_of(folder: Path, name: str, option: str, num_bytes: int, num_threads: int = 1) -> ByteStore:
    url = f"disk:{folder}/{name}?size={max(2 * num_bytes, 1 << 24)}{option}"
    return ByteStore(ByteStoreConfig((url,), num_threads=num_threads), {"benchmark": "sealed"})


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


def calls_of_system(path: Path, data: Bytes) -> dict[str, Callable[[], None]]:
    """Return calls that write the data to a new file, and that read them, by way of one piece of memory."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    room = memoryview(bytearray(PIECE_BYTES))

    def each(call: Callable[[int, list[memoryview], int], int]) -> None:
        for at in range(0, data.nbytes, PIECE_BYTES):
            call(fd, [room[: min(PIECE_BYTES, data.nbytes - at)]], at)

    return {"system put": lambda: each(os.pwritev), "system get": lambda: each(os.preadv)}


def times_of_two(
    stores: tuple[ByteStore, ByteStore], keys: list[bytes], data: Bytes, back: Bytes, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds on the clock of calls with all records, by threads. stores: with one thread, and with two."""
    calls = dict[str, Callable[[], object]]()
    for number, store in enumerate(stores, 1):
        calls[f"{number} put"] = functools.partial(store.put, keys, list(data), skip_existing=False)
        calls[f"{number} get"] = functools.partial(store.get_into, keys, list(back))
    return in_turns(calls, rounds)


def void(result: object) -> None:
    """Take a result that is not needed."""


def measure(kib: int, options: argparse.Namespace) -> Iterator[Row]:
    data = np.random.default_rng(0).integers(0, 256, (options.records, kib << 10), dtype=np.uint8)
    back, keys = np.zeros_like(data), [b"%d" % number for number in range(options.records)]
    with tempfile.TemporaryDirectory(dir=options.path) as text:
        folder = Path(text)
        (folder / "keys").write_text(f"bench {os.urandom(32).hex()}")
        ways = {"digests": "", "sealed": f"&seal_key_file={folder / 'keys'}"}
        stores = {name: store_of(folder, name, way, data.nbytes) for name, way in ways.items()}
        two = store_of(folder, "two", ways["sealed"], data.nbytes, 2)
        taken = times_of(stores, keys, data, back, folder, options.rounds)
        on_clock = times_of_two((stores["sealed"], two), keys, data, back, options.rounds)
        for store in (*stores.values(), two):
            store.close()
    for way, verb in (("in", "put"), ("out", "get")):
        yield {"KiB": kib, "way": way, **row_of(verb, data.nbytes, taken, on_clock)}


def times_of(
    stores: dict[str, ByteStore], keys: list[bytes], data: Bytes, back: Bytes, folder: Path, rounds: int
) -> dict[str, list[float]]:
    """Return the CPU seconds of each call. Raises AssertionError if other bytes come back."""
    calls, flat = calls_of(stores, keys, data, back), data.reshape(-1)
    system = calls_of_system(folder / "file", data)
    for name, call in calls.items():
        back[:] = 0
        call()
        assert name.endswith("put") or np.array_equal(back, data), "other bytes came back"
    calls["system put"] = system["system put"]
    calls |= {"copy": lambda: np.copyto(back, data), "aes": sealed_alone(flat)}
    calls["digest"] = lambda: void(digests_of(flat, FRAME_BYTES))
    calls["system get"] = system["system get"]  # after others, as a get: what is in a core's cache costs less
    return in_turns(calls, rounds, measure=cpu_seconds)


def row_of(verb: str, num_bytes: int, taken: dict[str, list[float]], on_clock: dict[str, list[float]]) -> Row:
    names = {"digests": f"digests {verb}", "sealed": f"sealed {verb}", "system": f"system {verb}"}
    names |= {name: name for name in ("aes", "digest", "copy")}
    least = [sum(times) for times in zip(taken["aes"], taken[f"system {verb}"], strict=True)]
    return {
        **{f"{name} GB/s": Figure.rate(num_bytes / 1e9, taken[call]) for name, call in names.items()},
        "ratio": Figure.ratio(taken[f"sealed {verb}"], taken[f"digests {verb}"]),
        "least": Figure.ratio(least, taken[f"digests {verb}"]),
        "two": Figure.ratio(on_clock[f"2 {verb}"], on_clock[f"1 {verb}"]),
    }


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
        sizes=option([64, 400, 1024, 2048, 4096, 8192], "KiB of a record"),
        path=PATH,
    )
    rows = shown(COLUMNS, itertools.chain.from_iterable(measure(kib, options) for kib in options.sizes))
    met = all(row["ratio"].median <= MOST for row in rows)
    finish(options, functools.partial(draw, rows), rows=rows, targets_met=met)


if __name__ == "__main__":
    main()
