"""Corrupted files of the disk tier: every byte of a record of 4 KiB, random bits, truncation, slots that were swapped,
duplicated, torn or of before, foreign files. What is read is a miss, or every bit as it was stored.

    DiskImage ─► some of its records mutated ─► opened, or mutated while it is open ─► every prompt read

A record that was mutated is a miss; one that was not is found, where its file still counts.
"""

import random
import tempfile
from pathlib import Path

from battery import Advance, Battery, Figures
from disk_image import NUM_RECORDS, SEGMENT, DiskImage
from support.insides import stack_of

from kvpage.store import KVStore
from kvpage.store.disk.disk_tier import SLOT_BYTES
from kvpage.store.disk.segment import HEADER_BYTES

NUM_MUTATED = 8  # records at once
Mutant = tuple[bytes, set[int]]  # the file, and the records in it that must be misses


def run(seed: int, count: int, advance: Advance) -> Figures:
    """`short` mutations change each byte of a record at least once, in a file at rest and in one that is open."""
    figures: Figures = {"mutations": 0, "verified_reads": 0, "misses": 0, "hits": 0, "max_record_bytes": 0}
    with tempfile.TemporaryDirectory() as place:
        image = DiskImage(Path(place) / "t")
        other, same = image.foreign("another model"), image.foreign("a model")
        figures["max_record_bytes"] = image.num_bytes
        number = 0
        while figures["mutations"] < count:
            rng = random.Random(f"{seed} {number}")
            try:
                before = figures["mutations"]
                _try_each(image, other, same, number, rng, figures)
            except Exception as error:
                raise AssertionError(f"seed {seed}, number {number}: {error}") from error
            advance(int(figures["mutations"] - before))
            number += 1
        assert number * NUM_MUTATED >= len(image.covered) or count < SHORT, "not every byte was changed"
    return figures


def _try_each(
    image: DiskImage, other: DiskImage, same: DiskImage, number: int, rng: random.Random, figures: Figures
) -> None:
    for is_open in (False, True):
        _try(image, _bytes(image, number, rng), is_open, figures)
    if number % 4:
        return
    mutants = (
        _bits(image, rng),
        _moved(image, rng),
        _older(image, rng),
        _foreign_slots(image, rng.choice([other, same]), rng),
    )
    for mutant in mutants:
        _try(image, mutant, rng.random() < 0.5, figures)
    _truncate(image, rng, figures)
    _try_files(image, other, rng, figures)


# --- mutants: the file, and which records must not be found in it ---


def _bytes(image: DiskImage, number: int, rng: random.Random) -> Mutant:
    """One byte each of NUM_MUTATED records: the next ones of all that tell something."""
    data, chosen = bytearray(image.data), rng.sample(range(NUM_RECORDS), NUM_MUTATED)
    for i, n in enumerate(chosen):
        at = image.covered[(number * NUM_MUTATED + i) % len(image.covered)]
        data[image.begins[n] + at] ^= rng.randint(1, 255)
    return bytes(data), set(chosen)


def _bits(image: DiskImage, rng: random.Random) -> Mutant:
    data, chosen = bytearray(image.data), rng.sample(range(NUM_RECORDS), NUM_MUTATED)
    for n in chosen:
        for at, bit in {(rng.choice(image.covered), rng.randrange(8)) for _ in range(rng.choice([1, 2, 3, 64]))}:
            data[image.begins[n] + at] ^= 1 << bit
    return bytes(data), set(chosen)


def _moved(image: DiskImage, rng: random.Random) -> Mutant:
    """Runs or what is in them at another's place, cleared, or torn between two."""
    data, (a, b, c, d, e, f) = bytearray(image.data), rng.sample(range(NUM_RECORDS), 6)
    data[image.run_at(a)], data[image.run_at(b)] = image.data[image.run_at(b)], image.data[image.run_at(a)]
    data[image.run_at(c)] = image.data[image.run_at(d)]  # d is there twice
    behind = slice(image.begins[e] + HEADER_BYTES, image.run_at(e).stop)
    source = image.begins[d] + HEADER_BYTES
    data[behind] = rng.choice([image.data[source : source + image.num_bytes], bytes(image.num_bytes)])
    cut = rng.randrange(HEADER_BYTES, HEADER_BYTES + image.num_bytes - 16)
    data[image.begins[f] + cut : image.run_at(f).stop] = image.data[image.begins[d] + cut : image.run_at(d).stop]
    return bytes(data), {a, b, c, e, f}


def _older(image: DiskImage, rng: random.Random) -> Mutant:
    """The record of before, which is right in itself, behind the header of now; and half of each."""
    data, chosen = bytearray(image.data), rng.sample(range(NUM_RECORDS), NUM_MUTATED)
    for n in chosen:
        cut = HEADER_BYTES + rng.choice([512, 1024, rng.randrange(512, image.num_bytes - 16)])
        old = image.stale_begins[n]
        data[image.begins[n] + cut : image.run_at(n).stop] = image.stale[
            old + cut : old + HEADER_BYTES + image.num_bytes
        ]
    return bytes(data), set(chosen)


def _foreign_slots(image: DiskImage, other: DiskImage, rng: random.Random) -> Mutant:
    """Of another directory's segment: whole runs, in the same places. They name another segment."""
    data, chosen = bytearray(image.data), rng.sample(range(NUM_RECORDS), NUM_MUTATED)
    for n in chosen:
        data[image.run_at(n)] = other.data[image.run_at(n)]
    return bytes(data), set(chosen)


# --- trying them ---


def _try(image: DiskImage, mutant: Mutant, is_open: bool, figures: Figures) -> None:
    """Opened as it is, or changed under a store that is open."""
    data, wrong = mutant
    with image.open({SEGMENT: image.data if is_open else data}) as store:
        if is_open:
            with (image.path / SEGMENT).open("r+b") as file:
                file.write(data)
        _read(image, store, wrong, set(range(NUM_RECORDS)) - wrong, figures)
        assert store.stats().corrupt_records <= len(wrong)
        stack_of(store).tiers[0].tier.check()
    figures["mutations"] += len(wrong)


def _truncate(image: DiskImage, rng: random.Random, figures: Figures) -> None:
    """What is before the cut is found while it is open; opened afterwards, what has whole slots before it."""
    length = rng.randrange(len(image.data))
    gone = {n for n in range(NUM_RECORDS) if image.run_at(n).stop > length}
    with image.open({SEGMENT: image.data}) as store:
        with (image.path / SEGMENT).open("r+b") as file:
            file.truncate(length)
        _read(image, store, gone, set(range(NUM_RECORDS)) - gone, figures)
    with image.open({SEGMENT: image.data[:length]}) as store:
        _read(image, store, gone, {n for n in range(NUM_RECORDS) if _slots_end(image, n) <= length}, figures)
    figures["mutations"] += 2


def _slots_end(image: DiskImage, n: int) -> int:
    return -(-image.run_at(n).stop // SLOT_BYTES) * SLOT_BYTES


def _try_files(image: DiskImage, other: DiskImage, rng: random.Random, figures: Figures) -> None:
    """Foreign files in the directory, alone and beside ours."""
    everything, long = set(range(NUM_RECORDS)), rng.randrange(3 * SLOT_BYTES)
    behind_a_header = image.data[:64] + rng.randbytes(len(image.data) - 64)
    stranger = rng.choice([other.data, rng.randbytes(long), behind_a_header, b""])
    with image.open({SEGMENT: stranger}) as store:
        _read(image, store, everything, set(), figures)
    with image.open({SEGMENT: image.data, "0001.segment": stranger, "notes": stranger}) as store:
        _read(image, store, set(), everything, figures)
    with image.open({SEGMENT: image.data, "0001.segment": image.data}) as store:  # the same one twice
        _read(image, store, set(), everything, figures)
    figures["mutations"] += 3


def _read(image: DiskImage, store: KVStore, wrong: set[int], right: set[int], figures: Figures) -> None:
    for n in range(NUM_RECORDS):
        is_found = image.find(store, n)
        assert not (is_found and n in wrong), f"record {n} was mutated and is found"
        assert is_found or n not in right, f"record {n} was not touched and is lost"
        figures["hits" if is_found else "misses"] += 1
        figures["verified_reads"] += 1


SHORT = 13_000
BATTERIES = [Battery("corrupted files of the disk tier", "mutations", SHORT, 1_000_000, run)]
