"""Looking into a disk tier beside the process that has it open: nothing false, nothing changed, nobody hindered."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.store_records import get, is_record, key, put, record
from support.waiting import until

pytest.importorskip("typer")

from typer.testing import CliRunner, Result  # noqa: E402

from kvpage.store import inspection  # noqa: E402
from kvpage.store.disk.disk_tier import SLOT_BYTES, DiskTier  # noqa: E402
from kvpage.store.disk.disk_view import MAX_WALKS, DiskView  # noqa: E402
from kvpage.store.disk.lock import owner_of  # noqa: E402
from kvpage.store.disk.segment import Segment  # noqa: E402
from kvpage.store.tiers.tier import RecordGone, TierError  # noqa: E402
from kvpage.tools.cli import app  # noqa: E402

TESTS = Path(__file__).parents[2]

SEGMENT_BYTES = 32 * SLOT_BYTES
A, B, C = key(0), key(1), key(2)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["store", *arguments], env={"COLUMNS": "200"})


def printed(done: Result) -> Any:
    """The line of JSON; standard error may stand beside it."""
    (line,) = [line for line in done.output.splitlines() if line.startswith(("[", "{"))]
    return json.loads(line)


def make(path: Path, data: dict[bytes, bytes]) -> DiskTier:
    tier = DiskTier([path], SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES)
    assert all(put(tier, data))
    return tier


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Another process, which evicts, replaces and removes all the time."""
    command = [sys.executable, "-m", "support.disk_owner", str(tmp_path)]
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    yield process
    process.kill()
    process.wait()


def test_beside_a_process_that_writes(owner: subprocess.Popen, tmp_path: Path) -> None:
    url, num_whole = f"disk://{tmp_path}", 0
    for _ in range(40):
        view = DiskView([tmp_path])
        count, broken = inspection.verify(view)
        assert broken == [] and view.stats().corrupted == 0
        assert [owner.pid for owner in view.owners] == [owner.pid]
        assert all(is_record(data, name) for name, data in whole(view).items())
        num_whole += count
        view.close()
    assert num_whole > 40 and owner.poll() is None
    for name in ("ls", "stat", "verify"):
        done = command(name, url)
        assert done.exit_code == 0, done.output
        assert f"process {owner.pid} on {socket.gethostname()} has it open" in done.output
    listed = printed(command("stat", url, "--json"))
    assert listed["num_records"] == sum(model["records"] for model in listed["models"])
    assert listed["num_bytes"] == sum(model["bytes"] for model in listed["models"])
    until(lambda: printed(command("ls", url, "--json")) != [])  # there are moments without a record
    for refused in (["gc", url, "--free", "1MiB"], ["gc", url, "--older-than", "1d"], ["verify", url, "--delete"]):
        done = command(*refused)
        assert done.exit_code != 0 and f"process {owner.pid} on {socket.gethostname()} has it" in str(done.exception)


def whole(view: DiskView) -> dict[bytes, bytes]:
    """Of those that are still there."""
    found = {}
    for info in view.infos():
        try:
            (data,) = get(view, [info.key])
        except RecordGone:
            continue
        if data is not None:
            found[info.key] = data
    return found


def test_after_the_owner_has_died(owner: subprocess.Popen, tmp_path: Path) -> None:
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    url = f"disk://{tmp_path}"
    done = command("verify", url)
    assert done.exit_code == 0 and " 0 are broken" in done.output and "has it open" not in done.output
    assert owner_of(tmp_path) is None
    assert "records removed" in command("gc", url, "--free", "1GiB").output
    assert printed(command("ls", url, "--json")) == []


def test_a_record_that_is_replaced_amid_reading(tmp_path: Path) -> None:
    """The bytes of another record come instead: they are handed out as nobody's."""
    tier = make(tmp_path, {A: record(A, 20_000), B: record(B, 20_000)})
    view = DiskView([tmp_path])
    (reader,) = view.open([A])
    assert reader is not None and len(reader.piece(0, 5000)) == 5000
    tier.remove([A])
    with pytest.raises(RecordGone, match="removed or replaced"):
        reader.piece(5000, 10_000)
    put(tier, {C: record(C, 20_000)})
    with pytest.raises(RecordGone):
        reader.piece(5000, 10_000)
    reader.close()
    assert view.open([A, C]) == [None, None] and view.contains([A, B, C]) == [False, True, False]
    assert get(view, [B]) == [record(B, 20_000)] and view.stats().num_records == 1
    view.close()
    tier.close()


def test_what_goes_while_it_is_verified_is_neither_whole_nor_broken(tmp_path: Path, monkeypatch) -> None:
    tier = make(tmp_path, {A: record(A), B: record(B)})
    view, real = DiskView([tmp_path]), inspection.verify_record

    def verify_record(reader, name: bytes) -> None:
        if name == A:
            tier.remove([A])
        real(reader, name)

    monkeypatch.setattr(inspection, "verify_record", verify_record)
    assert inspection.verify(view) == (1, [])
    monkeypatch.setattr(inspection, "read_head", lambda reader: tier.remove([B]) and real(reader, B))
    assert list(inspection.summaries(view)) == []
    view.close()
    tier.close()


def test_a_walk_that_the_owner_overtakes(tmp_path: Path, monkeypatch) -> None:
    """The walk has passed A when a record takes the room of A and B: B's header is in the midst of its bytes."""
    tier, real, walked = make(tmp_path, {A: record(A, 9000), B: record(B, 9000)}), Segment.run_at, []

    def run_at(segment: Segment, slot: int):
        walked.append(slot)
        if len(walked) == 2:
            tier.remove([A, B])
            put(tier, {C: record(C, 100_000)})
        return real(segment, slot)

    monkeypatch.setattr(Segment, "run_at", run_at)
    view = DiskView([tmp_path])
    assert walked[1] > 1 and len(walked) > 10, "it went from slot to slot"
    assert get(view, [A, B, C]) == [None, None, record(C, 100_000)] and view.stats().corrupted == 0
    view.close()
    tier.close()


@pytest.mark.parametrize("has_owner", [True, False])
def test_damage_is_told(tmp_path: Path, has_owner: bool) -> None:
    tier = make(tmp_path, {A: record(A, 9000), B: record(B, 9000), C: record(C, 9000)})
    if not has_owner:
        tier.close()
    (file,) = tmp_path.glob("*.segment")
    slots = [slot for slot in range(1, 32) if file.read_bytes()[slot * SLOT_BYTES :].startswith(b"kvpagern")]
    with open(file, "r+b") as data:
        for place in (slots[0] * SLOT_BYTES + 20, slots[1] * SLOT_BYTES + 2000):
            data.seek(place)
            (byte,) = data.read(1)
            data.seek(place)
            data.write(bytes([byte ^ 1]))
    view = DiskView([tmp_path])
    num_whole, broken = inspection.verify(view)
    assert (num_whole, len(broken), view.stats().corrupted) == (1, 1, 1)
    view.close()
    tier.close()


def test_places_that_change_from_walk_to_walk_are_no_damage(tmp_path: Path, monkeypatch) -> None:
    make(tmp_path, {A: record(A)}).close()
    real, walks = Segment.runs, []

    def runs(segment: Segment):
        walks.append(0)
        yield from real(segment)
        yield type(next(real(segment)))(len(walks) + 40, 1, has_header=False)

    monkeypatch.setattr(Segment, "runs", runs)
    view = DiskView([tmp_path])
    assert len(walks) == MAX_WALKS and view.stats().corrupted == 0 and get(view, [A]) == [record(A)]
    view.close()


def test_a_file_that_is_being_made(tmp_path: Path) -> None:
    tier = make(tmp_path, {A: record(A)})
    (tmp_path / "0007.segment").write_bytes(bytes(SEGMENT_BYTES))
    (tmp_path / "0008.segment").write_bytes(b"")
    view = DiskView([tmp_path])
    assert get(view, [A]) == [record(A)] and view.stats().corrupted == 0
    view.close()
    (tmp_path / "0009.segment").write_bytes(b"?" * SEGMENT_BYTES)
    view = DiskView([tmp_path])
    assert view.stats().corrupted == 1
    view.close()
    tier.close()
    view = DiskView([tmp_path])
    assert view.stats().corrupted == 3 and view.owners == ()
    view.close()


def test_nothing_is_changed_and_nobody_hindered(tmp_path: Path) -> None:
    make(tmp_path, {A: record(A)}).close()
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    view = DiskView([tmp_path])
    for call in (
        lambda: view.create(B, 100),
        lambda: view.commit([]),
        lambda: view.remove([A]),
        view.clear,
    ):
        with pytest.raises(TierError, match="open for reading only, nothing can be changed"):
            call()
    view.flush(sync=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == files
    tier = make(tmp_path, {B: record(B)})  # who serves may begin meanwhile
    assert get(view, [A, B]) == [record(A), None]
    tier.close()
    view.close()
    view.close()
    with pytest.raises(TierError, match="closed"):
        view.stats()


def test_who_has_it(tmp_path: Path) -> None:
    tier = make(tmp_path, {A: record(A)})
    assert owner_of(tmp_path) == (os.getpid(), socket.gethostname())
    with pytest.raises(ValueError, match=f"must be open once, another tier of this process, {os.getpid()}, has it"):
        make(tmp_path, {})
    (tmp_path / "lock").write_bytes(b"")  # as former versions left it
    with pytest.raises(ValueError, match="must be open once, another tier or process has it"):
        make(tmp_path, {})
    tier.close()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    here = socket.gethostname()
    for text, expected in (
        (f"{dead.pid} {here}\n", None),
        (f"{os.getpid()} {here}\n", (os.getpid(), here)),
        ("1 elsewhere\n", (1, "elsewhere")),
        ("soon maybe\n", None),
        ("-1 here\n", None),
        ("0 here\n", None),
        ("7\n", None),
        ("\xff" * 600, None),
    ):
        (tmp_path / "lock").write_text(text, encoding="latin-1")
        assert owner_of(tmp_path) == expected, text
    make(tmp_path, {}).close()
    assert (tmp_path / "lock").read_bytes() == b"" and owner_of(tmp_path) is None
