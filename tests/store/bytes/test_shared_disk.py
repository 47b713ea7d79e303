"""Stores that read what others write to disk: at once and exactly, whatever becomes of the writers."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.byte_stores import MEMORY, SIZES, data_of, disk, key_of, opened, room
from support.byte_writer import NUM_KEYS, is_whole
from support.byte_writer import SIZES as WRITTEN_SIZES
from support.byte_writer import key_of as written_key

from kvpage.store import ByteStore
from kvpage.store.disk import journal
from kvpage.store.disk.shared_disk import SharedDisk
from kvpage.store.tiers.tier import TierError

KEYS = [key_of(number) for number in range(len(SIZES))]
RECORDS = [data_of(number, size) for number, size in enumerate(SIZES)]


def reads(store: ByteStore, key: bytes, size: int) -> bytes | None:
    one = room(size)
    return bytes(one) if store.get_into([key], [one]) == [True] else None


def test_what_another_store_writes_is_there_at_once(tmp_path: Path) -> None:
    with opened(f"disk-view://{tmp_path / 'a'}") as reader:
        assert reader.contains(KEYS) == [False] * len(KEYS), "before there is a directory"
        with opened(disk(tmp_path / "a")) as writer:
            for key, record in zip(KEYS, RECORDS, strict=True):
                assert writer.put([key], [record]) == [True]
                assert reader.contains([key]) == [True] and reads(reader, key, len(record)) == record
            writer.put(KEYS[1:2], [b"y"], skip_existing=False)
            assert reads(reader, KEYS[1], 1) == b"y"
            writer.put(KEYS[1:2], [b"longer"], skip_existing=False)
            assert reads(reader, KEYS[1], 1) is None and reads(reader, KEYS[1], 6) == b"longer"
            assert writer.remove(KEYS[2:4]) == [True, True]
            assert reader.contains(KEYS) == [number not in (2, 3) for number in range(len(KEYS))]
            assert reads(reader, KEYS[2], SIZES[2]) is None
            writer.clear()
            assert reader.contains(KEYS) == [False] * len(KEYS)
            writer.put(KEYS[:1], [b"again"])
        assert reads(reader, KEYS[0], 5) == b"again", "after its writer has gone"
        assert reader.stats().tier_errors == 0 and reader.stats().corrupt_records == 1  # the one of another size


def test_nothing_can_be_changed_through_a_view(tmp_path: Path) -> None:
    with opened(disk(tmp_path)) as writer, opened(f"disk-view://{tmp_path}") as reader:
        writer.put(KEYS[:2], [b"1", b"2"])
        assert reader.put(KEYS[:3], [b"x"] * 3) == [True, True, False] and reader.remove(KEYS[:2]) == [False, False]
        assert reader.clear() == ["disk-view"]
        reader.flush(sync=True)
        assert reader.put(KEYS[:1], [b"x"], skip_existing=False) == [False]
        assert reads(reader, KEYS[0], 1) == b"1" and writer.contains(KEYS[:3]) == [True, True, False]
        assert reader.stats().tier_errors == 0 and reader.stats().tiers[0].num_records == 2
    view = SharedDisk([tmp_path])
    for call in (lambda: view.create(bytes(32), 1), lambda: view.commit([]), lambda: view.remove([]), view.clear):
        with pytest.raises(TierError, match="reading only"):
            call()
    view.close()
    with pytest.raises(TierError, match="closed"):
        view.contains([bytes(32)])
    with pytest.raises(ValueError, match="paths must"):
        SharedDisk([])


def test_each_writes_its_own_directory_and_reads_all(tmp_path: Path) -> None:
    view = f"disk-view://{tmp_path}/*"
    with opened(MEMORY, disk(tmp_path / "a"), view) as first, opened(MEMORY, disk(tmp_path / "b"), view) as second:
        assert first.put(KEYS, RECORDS) == [True] * len(KEYS)
        for key, record in zip(KEYS, RECORDS, strict=True):
            assert reads(second, key, len(record)) == record
        assert second.stats().tiers[2].hits == len(KEYS) and second.stats().tiers[0].num_records == len(KEYS)
        assert first.remove(KEYS) == [True] * len(KEYS)
        assert first.contains(KEYS) == [True] * len(KEYS), "the other has copies"
        with opened(disk(tmp_path / "c")) as third:
            third.put([b"of c"], [b"x"])
            assert first.contains([b"of c"]) == second.contains([b"of c"]) == [True]
        shutil.rmtree(tmp_path / "c")
        assert first.contains([b"of c"]) == [False]


@pytest.mark.parametrize("num_between", [1, 3, 4, 9, 40])
def test_a_journal_that_begins_anew_loses_nothing(num_between: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(journal, "MAX_BYTES", journal.HEAD.size + 4 * journal.PLACE.size)
    with opened(disk(tmp_path)) as writer, opened(f"disk-view://{tmp_path}") as reader:
        for begin in range(0, 80, num_between):
            keys = [key_of(number) for number in range(begin, begin + num_between)]
            assert all(writer.put(keys, [data_of(number, 100) for number in range(begin, begin + num_between)]))
            assert reader.contains(keys) == [True] * num_between
        for number in range(80):
            assert reads(reader, key_of(number), 100) == data_of(number, 100)


@pytest.mark.parametrize("damage", ["garbage", "empty", "gone", "false places", "link"])
def test_a_wrong_journal_costs_misses_and_no_wrong_byte(damage: str, tmp_path: Path) -> None:
    with opened(disk(tmp_path)) as writer, opened(f"disk-view://{tmp_path}") as reader:
        writer.put(KEYS[:2], [b"1" * 100, b"2" * 9000])
        assert reader.contains(KEYS[:2]) == [True, True]
        path = journal.journal_path(tmp_path)
        if damage == "false places":
            with open(path, "ab") as file:
                file.write(journal.PLACE.pack(bytes(16), 0, 1) + journal.PLACE.pack(bytes(16), 1 << 60, 1 << 60) + b"x")
        else:
            path.unlink()
            if damage == "link":
                path.symlink_to("/etc/passwd")
            elif damage != "gone":
                path.write_bytes(b"garbage" * 9 if damage == "garbage" else b"")
        for key, record in zip(KEYS[:2], [b"1" * 100, b"2" * 9000], strict=True):
            assert reads(reader, key, len(record)) in (record, None)
    with opened(disk(tmp_path)) as writer, opened(f"disk-view://{tmp_path}") as reader:
        writer.put(KEYS[2:3], [b"3"])
        assert reads(reader, KEYS[0], 100) == b"1" * 100 and reads(reader, KEYS[2], 1) == b"3", "its owner mends it"


def test_a_directory_that_is_deleted_and_made_anew(tmp_path: Path) -> None:
    with opened(disk(tmp_path / "a")) as writer, opened(f"disk-view://{tmp_path / 'a'}") as reader:
        writer.put([b"old"], [b"1"])
        assert reader.contains([b"old"]) == [True]
        shutil.rmtree(tmp_path / "a")
        assert reader.contains([b"old"]) == [False]
        assert writer.put([b"new"], [b"2"]) == [True]
        assert reader.contains([b"old", b"new"]) == [False, True] and reads(reader, b"new", 1) == b"2"


def test_a_damaged_record_of_another_is_a_miss_and_stays_its_owners(tmp_path: Path) -> None:
    with opened(disk(tmp_path)) as writer, opened(f"disk-view://{tmp_path}") as reader:
        writer.put([b"k"], [b"x" * 20000])
        (path,) = tmp_path.glob("*.segment")
        data = path.read_bytes()
        at = data.index(b"x" * 1000) + 500
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(b"y")
        assert reads(reader, b"k", 20000) is None and reader.stats().corrupt_records == 1
        assert writer.contains([b"k"]) == [True] and reads(writer, b"k", 20000) is None


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[list[subprocess.Popen]]:
    tests = Path(__file__).parents[2]
    paths = [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "support.byte_writer"]
    made = [
        subprocess.Popen([*command, str(tmp_path / str(n)), str(n)], stdout=subprocess.PIPE, text=True, env=environ)
        for n in range(2)
    ]
    for process in made:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
    yield made
    for process in made:
        process.kill()
        process.wait()


def test_processes_that_write_all_the_time_and_are_killed(writers: list[subprocess.Popen], tmp_path: Path) -> None:
    """Whatever is read is one whole record, beside two writers that evict, replace and remove; and after kill -9."""
    pairs = [
        (written_key(writer, number), WRITTEN_SIZES[number % 3]) for writer in range(2) for number in range(NUM_KEYS)
    ]
    with opened(f"disk-view://{tmp_path}/*") as reader:
        num_read = 0
        for _ in range(30):
            rooms = [room(size) for _, size in pairs]
            found = reader.get_into([key for key, _ in pairs], rooms)
            num_read += sum(found)
            assert all(is_whole(bytes(one)) for one, is_found in zip(rooms, found, strict=True) if is_found)
        assert num_read > 100
        for process in writers:
            process.send_signal(signal.SIGKILL)
            process.wait()
        rooms = [room(size) for _, size in pairs]
        found = reader.get_into([key for key, _ in pairs], rooms)
        assert found == reader.contains([key for key, _ in pairs]) and sum(found) > 10, "now nobody changes anything"
        assert all(is_whole(bytes(one)) for one, is_found in zip(rooms, found, strict=True) if is_found)
        with opened(disk(tmp_path / "0")) as writer:
            assert writer.put([b"after"], [b"x"]) == [True] and reads(reader, b"after", 1) == b"x"
            for key, size in pairs[:NUM_KEYS]:
                mine, others = reads(writer, key, size), reads(reader, key, size)
                assert mine == others


def test_a_place_that_cannot_be_is_a_miss(tmp_path: Path) -> None:
    with opened(disk(tmp_path)) as writer, opened(f"disk-view://{tmp_path}") as reader:
        writer.put(KEYS[:1], [b"1"])
        assert reader.contains(KEYS[:2]) == [True, False]
        with open(journal.journal_path(tmp_path), "ab") as file:
            (segment,) = tmp_path.glob("*.segment")
            segment_id = segment.read_bytes()[16:32]
            for slot in (0, 1 << 40, 1 << 51, (1 << 64) - 1):
                for one in (segment_id, bytes(16)):
                    file.write(journal.PLACE.pack(one, int(segment.stem), slot))
        assert reader.contains(KEYS[:2]) == [True, False] and reads(reader, KEYS[0], 1) == b"1"


def test_a_pipe_in_the_place_of_a_journal_holds_up_nobody(tmp_path: Path) -> None:
    with opened(disk(tmp_path / "a")) as writer:
        writer.put(KEYS[:1], [b"1"])
    (tmp_path / "a" / "journal").unlink()
    os.mkfifo(tmp_path / "a" / "journal")
    with opened(f"disk-view://{tmp_path / 'a'}") as reader:
        assert reader.contains(KEYS[:1]) == [False]


def test_directories_of_other_users_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(disk(tmp_path / "a")) as writer:
        writer.put(KEYS[:1], [b"1"])
    with opened(f"disk-view://{tmp_path}/*") as reader:
        assert reader.contains(KEYS[:1]) == [True]
    if os.geteuid():
        pytest.skip("needs root, which can give a directory away")
    os.chown(tmp_path / "a", 12345, -1)
    with opened(f"disk-view://{tmp_path}/*") as reader:
        assert reader.contains(KEYS[:1]) == [False]
    os.chown(tmp_path, 12345, -1)
    with opened(f"disk-view://{tmp_path}/*") as reader:
        assert reader.contains(KEYS[:1]) == [True], "the parent's owner is trusted"


def test_a_reader_forgets_what_is_written_over(tmp_path: Path) -> None:
    with (
        opened(disk(tmp_path, "128KiB").replace("8MiB", "128KiB")) as writer,
        opened(f"disk-view://{tmp_path}") as reader,
    ):
        for number in range(200):
            assert writer.put([key_of(number)], [data_of(number, 9000)]) == [True]
            assert reader.contains([key_of(number)]) == [True]
        assert reader.stats().tiers[0].num_records <= 2 * writer.stats().tiers[0].num_records
