"""A process that has a disk tier open and writes until it is killed: disk_owner.py FOLDER. It says when it does."""

import random
import sys

from support.store_records import key, record

from kvpage.store.disk.disk_tier import DiskTier


def main() -> None:
    tier, rng, number = DiskTier([sys.argv[1]], 1 << 20, segment_bytes=1 << 19), random.Random(0), 0
    while True:
        number += 1
        name = key(rng.randrange(60))
        if rng.random() < 0.2:
            tier.remove([name])
        else:
            data = record(name, rng.randrange(1, 60_000), seed=number)
            writer = tier.create(name, len(data))
            assert writer is not None
            with writer:
                writer.piece(0, len(data))[:] = data
                tier.commit([writer])
        if number == 100:
            print("writing", flush=True)


if __name__ == "__main__":
    main()
