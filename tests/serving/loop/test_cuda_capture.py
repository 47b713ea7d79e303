"""CudaCapturer on a fake torch.cuda: the order of its calls, and the state that a failed capture leaves."""

import contextlib
import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from kvpage.checks.device_lock import CAPTURING
from kvpage.serving.loop.graphs.capture import CannotCapture, CudaCapturer, WaitFinder

MIB = 2**20


class FakeCuda:
    """Streams are names. The memory that is left falls by what each graph takes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.current, self.free, self.breaks = "main", 100 * MIB, False
        cuda = self

        class Stream:
            def __init__(self, name: str = "side") -> None:
                self.name = name

            def wait_stream(self, other: "Stream") -> None:
                cuda.log.append(f"{self.name} waits for {other.name}")

        class Graph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                cuda.log.append(f"begin on {cuda.current}, pool {pool}, {capture_error_mode}")

            def capture_end(self) -> None:
                cuda.log.append("end")
                cuda.free -= 3 * MIB
                if cuda.breaks:
                    raise RuntimeError("the capture was invalidated")

            def pool(self) -> str:
                return "of the first"

            def replay(self) -> None:
                cuda.log.append("replay")

        @contextlib.contextmanager
        def on(stream: Stream) -> Iterator[None]:
            before, self.current = self.current, stream.name
            try:
                yield
            finally:
                self.current = before

        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(torch.cuda, "current_stream", lambda: Stream(self.current))
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch.cuda, "mem_get_info", lambda: (self.free, 0))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_work_runs_twice_before_it_is_recorded_on_one_stream(cuda: FakeCuda) -> None:
    capturer = CudaCapturer(torch.device("cuda", 0))
    first = capturer.capture(lambda: cuda.log.append(f"work on {cuda.current}"), None)
    assert cuda.log == [
        "side waits for main", "work on side", "work on side", "begin on side, pool None, thread_local", "work on side",
        "end", "main waits for side",
    ]  # fmt: skip
    assert first.num_bytes == 3 * MIB and cuda.current == "main"
    cuda.log.clear()
    capturer.capture(lambda: None, first).replay()
    assert "begin on side, pool of the first, thread_local" in cuda.log and cuda.log[-1] == "replay"


def test_work_that_waits_is_found_before_a_capture_begins(cuda: FakeCuda) -> None:
    with pytest.raises(CannotCapture, match="the model waits for the device, in _local_scalar_dense"):
        CudaCapturer(torch.device("cuda", 0)).capture(lambda: torch.ones(1).item(), None)
    assert not any(line.startswith("begin") for line in cuda.log)
    assert cuda.current == "main" and cuda.log[-1] == "main waits for side"


@pytest.mark.parametrize("error", [RuntimeError("not permitted"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_amid_a_capture_ends_it_and_comes_through(cuda: FakeCuda, error: BaseException) -> None:
    def work() -> None:
        if any(line.startswith("begin") for line in cuda.log):
            raise error

    cuda.breaks = True
    with pytest.raises(type(error)) as caught:
        CudaCapturer(torch.device("cuda", 0)).capture(work, None)
    assert caught.value is error and cuda.current == "main" and cuda.log[-2:] == ["end", "main waits for side"]


@pytest.mark.parametrize("raises", [False, True])
def test_no_garbage_is_collected_amid_a_capture(cuda: FakeCuda, raises: bool) -> None:
    """An object that owns pinned memory waits for the device as it goes."""
    states = []

    def work() -> None:
        states.append(gc.isenabled())
        if raises and len(states) == 3:
            raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError) if raises else contextlib.nullcontext():
        CudaCapturer(torch.device("cuda", 0)).capture(work, None)
    assert states == [True, True, False] and gc.isenabled()


def test_whoever_waits_for_the_device_waits_for_a_recording_first(cuda: FakeCuda) -> None:
    """CUDA lets no thread wait for all of a device while a stream is captured."""
    taken: list[bool] = []

    def try_to_wait() -> None:
        taken.append(CAPTURING.acquire(blocking=False))
        if taken[-1]:
            CAPTURING.release()

    def work() -> None:
        thread = threading.Thread(target=try_to_wait)
        thread.start()
        thread.join()

    CudaCapturer(torch.device("cuda", 0)).capture(work, None)
    assert taken == [True, True, False], "while it is recorded alone"
    work()
    assert taken[-1]


def test_what_waits() -> None:
    x = torch.arange(4.0)
    for work in (
        lambda: x[0].item(), lambda: bool(x[0]), lambda: x.nonzero(), lambda: x[x > 1], lambda: x.masked_select(x > 1),
        lambda: x.unique(), lambda: x.repeat_interleave(x.long()), lambda: x.to("meta"), lambda: torch.equal(x, x),
    ):  # fmt: skip
        with pytest.raises(CannotCapture), WaitFinder():
            work()
    with WaitFinder():
        torch.where(x > 1, x, -x)[1:].view(3).to(torch.float64)[torch.arange(2)].clamp(min=0).max(dim=-1)
