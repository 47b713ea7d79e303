"""DiskImage: the files of a disk tier with one record of 4 KiB a prompt, to be mutated and read through the KVStore."""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from stamps import STAMP_BYTES, difference, stamps
from support.insides import stack_of

from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata
from kvpage.store.disk.disk_tier import SLOT_BYTES, DiskTier
from kvpage.store.disk.segment import HEADER_BYTES, RECORD, RUN, RUN_MAGIC
from kvpage.store.records.keys import ChunkKeys

CHUNK, LAYERS, SIZE = 16, 2, 14  # tokens, layers, elements of a head
LAYER_BYTES = 2 * CHUNK * SIZE * 4
SEGMENT_BYTES = 64 * SLOT_BYTES
NUM_RECORDS = 12
STALE, FRESH = 1, 2  # generations: each record was stored twice
SEGMENT = "0000.segment"
METADATA = KVStoreMetadata("a model", kv_dtype=torch.float32)


def prompt(n: int) -> list[int]:
    return [n + 1] * CHUNK


def content(n: int, generation: int) -> torch.Tensor:
    """float32 [layers, 2, tokens, heads, size], its bits those of stamps."""
    words = stamps(n, generation, LAYERS, LAYER_BYTES // STAMP_BYTES)
    return torch.from_numpy(words.view("float32").reshape(LAYERS, 2, CHUNK, 1, SIZE))


class DiskImage:
    """data: of the segment as it was stored. stale: as it was before the records were stored again. begins: of each
    record's run in the file, and in `stale`. covered: bytes of a run, from its begin, that tell something.
    """

    def __init__(self, place: Path, metadata: KVStoreMetadata = METADATA) -> None:
        self.path, self.metadata = place, metadata
        with self.open({}) as store:
            self._fill(store, STALE)
            store.flush()
            self.stale = (place / SEGMENT).read_bytes()
            self._fill(store, FRESH)
            (info, *_) = stack_of(store).tiers[0].tier.infos()
        self.num_bytes = info.num_bytes
        self.data = (place / SEGMENT).read_bytes()
        self.begins, self.stale_begins = self._find(self.data), self._find(self.stale)
        self.covered = [*range(RUN.size), *range(HEADER_BYTES, HEADER_BYTES + self.num_bytes)]

    def open(self, files: dict[str, bytes]) -> KVStore:
        """A store on a directory with these files."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(mode=0o700)
        for name, data in files.items():
            (self.path / name).write_bytes(data)
        tier = DiskTier([self.path], 2 * SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES)
        return KVStore(KVStoreConfig(CHUNK, num_threads=1), self.metadata, [tier])

    def run_at(self, n: int) -> slice:
        """The bytes of a record's run in the file."""
        return slice(self.begins[n], self.begins[n] + HEADER_BYTES + self.num_bytes)

    def find(self, store: KVStore, n: int) -> bool:
        """Whether a prompt is found; AssertionError if it is not every bit as it was stored last."""
        kv, mask = store.retrieve(prompt(n), return_tuple=False)
        if not mask.any():
            return False
        assert mask.all(), f"prompt {n}: {int(mask.sum())} tokens of a chunk"
        found, wanted = kv.numpy().tobytes(), content(n, FRESH).numpy().tobytes()
        assert found == wanted, f"prompt {n}: {difference(found, wanted, payload_begin=0)}"
        return True

    def foreign(self, model_name: str) -> "DiskImage":
        """Another one beside it, of a model of that name."""
        name = f"{self.path.name} of {model_name}"
        return DiskImage(self.path.with_name(name), replace(self.metadata, model_name=model_name))

    def _fill(self, store: KVStore, generation: int) -> None:
        for n in range(NUM_RECORDS):
            assert store.store(prompt(n), content(n, generation), skip_existing=False).result() == 1

    def _find(self, data: bytes) -> list[int]:
        keys = ChunkKeys(self.metadata, CHUNK)
        runs = [(begin, RUN.unpack_from(data, begin)) for begin in range(SLOT_BYTES, len(data), SLOT_BYTES)]
        begins = {run[8]: begin for begin, run in runs if run[:2] == (RUN_MAGIC, RECORD)}  # by key
        return [begins[keys.of(prompt(n))[0]] for n in range(NUM_RECORDS)]
