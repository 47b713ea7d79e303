"""Errors that kernels report reach the loop: once, without a wait, and on the right device."""

import contextlib

import pytest
import torch

from kvpage.ops.cuda import chunks as chunk_ops_cuda
from kvpage.ops.cuda import error_reports
from kvpage.ops.cuda import rows as token_ops_cuda
from kvpage.ops.cuda.error_reports import ErrorReports

DEVICE = torch.device("cuda", 1)


class FakeWord:
    """A copy that lands when the test says so."""

    def __init__(self) -> None:
        made.append(self)

    def begin(self, word: torch.Tensor) -> None:
        self.bits, self.has_come = int(word[0]), False

    def wait(self) -> None:
        for one in made[: made.index(self) + 1]:
            one.has_come = True

    def read(self) -> int | None:
        return self.bits if self.has_come else None


made: list[FakeWord] = []


@pytest.fixture
def word(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The error word of a device that is not here."""
    made.clear()
    word = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(token_ops_cuda, "_error_words", {DEVICE: word})
    monkeypatch.setattr(error_reports, "_FetchedWord", FakeWord)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return word


def test_an_error_is_raised_once_when_it_has_come(word: torch.Tensor) -> None:
    reports = ErrorReports(DEVICE)
    reports.check()  # nothing was fetched
    word[0] = 2 | 8
    reports.fetch()
    reports.check()  # on its way: nobody waits
    made[0].has_come = True
    with pytest.raises(ValueError, match="block_tables held .*; fresh_rows held .* on cuda:1; it was skipped"):
        reports.check()
    assert word[0] == 0
    reports.check()
    reports.fetch()
    assert len(made) == 1, "the room is used again"
    made[0].has_come = True
    reports.check()


def test_all_passes_are_waited_for_where_nobody_fetches_tokens(word: torch.Tensor) -> None:
    """None is kept: passes may go on for ever."""
    reports = ErrorReports(DEVICE)
    reports.check_all()
    for _ in range(100):
        reports.fetch()
        reports.check_all()
    assert len(made) == 1
    reports.fetch()
    word[0] = 1
    reports.fetch()
    with pytest.raises(ValueError, match="slot_mapping held"):
        reports.check_all()
    assert word[0] == 0 and len(made) == 2


def test_a_pass_that_was_begun_ahead(word: torch.Tensor) -> None:
    """The word of each pass is read after that pass; what was begun after a bad one tells nothing new."""
    reports = ErrorReports(DEVICE)
    reports.fetch()
    word[0] = 1
    reports.fetch()
    made[0].has_come = True
    reports.check()
    reports.fetch()
    made[1].has_come = True
    with pytest.raises(ValueError, match="slot_mapping held"):
        reports.check()
    reports.check()
    reports.fetch()
    made[-1].has_come = True
    reports.check()
    assert word[0] == 0


def test_without_kernels_there_is_nothing_to_fetch(word: torch.Tensor) -> None:
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        reports = ErrorReports(device)
        reports.fetch()
        reports.check()
    assert not made


class PlayedCuda:
    """The current device, and a capture on one of the devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capturing: int | None) -> None:
        self.current = 0

        @contextlib.contextmanager
        def device(chosen: torch.device):
            before, self.current = self.current, chosen.index
            yield
            self.current = before

        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.current == capturing)


@pytest.mark.parametrize("capturing", [0, 1])
def test_a_capture_is_asked_for_on_the_device_of_the_blocks(monkeypatch, capturing: int) -> None:
    """The current device is 0, the blocks are on 1: a capture on 0 is none of theirs, and one on 1 counts."""
    PlayedCuda(monkeypatch, capturing)
    monkeypatch.setattr(token_ops_cuda, "_error_words", {})
    monkeypatch.setattr(torch, "zeros", lambda *size, **fields: torch.full((1,), 7))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("", (), {"synchronize": lambda self: None})())
    if capturing == 1:
        with pytest.raises(ValueError, match="must have run once on cuda:1 before a graph captures"):
            token_ops_cuda._error_word(DEVICE)
        assert not token_ops_cuda._error_words
    else:
        word = token_ops_cuda._error_word(DEVICE)
        assert token_ops_cuda._error_word(DEVICE) is word


@pytest.mark.parametrize("capturing", [0, 1])
def test_a_chunk_of_host_ids_in_a_capture(monkeypatch, capturing: int) -> None:
    kernel = pytest.importorskip("kvpage.kernels.chunk", reason="needs triton")
    PlayedCuda(monkeypatch, capturing)
    cache, ids, launches = type("", (), {"device": DEVICE})(), torch.zeros(1, dtype=torch.int32), []
    layout = type("", (), {"views": lambda self, cache: ()})()
    monkeypatch.setattr(kernel, "move_chunk", lambda *arguments, one_by_one: launches.append(one_by_one))
    for name, value in {
        "_has_triton": lambda: True,
        "_alike": lambda *_: [(0, 1)],
        "_error_word": lambda _: None,
    }.items():
        monkeypatch.setattr(chunk_ops_cuda, name, value)
    monkeypatch.setattr(chunk_ops_cuda, "_check_if_debugging", lambda device: None)
    if capturing == 1:
        with pytest.raises(ValueError, match="block_ids must be on the device where a graph captures"):
            chunk_ops_cuda.store_chunk([cache], ids, 0, torch.zeros(1), layout)
    else:
        chunk_ops_cuda.store_chunk([cache], ids, 0, torch.zeros(1), layout)
    assert launches == ([] if capturing == 1 else [False])
