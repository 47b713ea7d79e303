"""A process with a ByteStore on a disk of its own, which it fills until it is killed: byte_writer.py FOLDER NUMBER."""

import random
import sys

from support.byte_stores import HEADER, disk

from kvpage.store import ByteStore, ByteStoreConfig

SIZES = [8, 5000, 300_000]  # by the number of a key, modulo 3
NUM_KEYS = 30


def record_of(seed: int, size: int) -> bytes:
    """Bytes that tell whether they are whole: a seed, and what it makes."""
    return seed.to_bytes(8, "little") + random.Random(seed).randbytes(size - 8)


def is_whole(data: bytes) -> bool:
    return record_of(int.from_bytes(data[:8], "little"), len(data)) == data


def key_of(writer: int, number: int) -> bytes:
    return b"%d of %d" % (number, writer)


def main(folder: str, writer: int) -> None:
    rng = random.Random(writer)
    store = ByteStore(ByteStoreConfig((disk(folder, "4MiB").replace("8MiB", "1MiB"),), num_threads=1), HEADER)
    for step in range(1 << 30):
        number = rng.randrange(NUM_KEYS)
        if rng.random() < 0.1:
            store.remove([key_of(writer, number)])
        else:
            store.put(
                [key_of(writer, number)], [record_of(rng.getrandbits(63), SIZES[number % 3])], skip_existing=False
            )
        if step == 60:
            print("writing", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
