"""Captures and fetches on a CPU, in place of a device: a replay is work that runs again, a fetch comes at `wait`."""

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

from kvpage.serving import Engine
from kvpage.serving.loop.batch.device_decoder import DeviceDecoder
from kvpage.serving.loop.graphs.capture import Replay, WaitFinder


class CpuReplay:
    """Work that runs again on the same static tensors."""

    def __init__(self, work: Callable[[], None], num_bytes: int) -> None:
        self._work, self.num_bytes, self.num_replays = work, num_bytes, 0

    def replay(self) -> None:
        self.num_replays += 1
        self._work()


class CpuCapturer:
    """Each capture takes `num_bytes`. finds_waits: refuse work that waits, as a CUDA device's capturer does."""

    def __init__(self, num_bytes: int = 100, finds_waits: bool = False) -> None:
        self._num_bytes, self._finds_waits = num_bytes, finds_waits
        self.beside: list[Replay | None] = []
        self.num_releases = 0

    def capture(self, work: Callable[[], None], beside: Replay | None) -> CpuReplay:
        self.beside.append(beside)
        work()
        if self._finds_waits:
            with WaitFinder():
                work()
        return CpuReplay(work, self._num_bytes)

    def release_memory(self) -> None:
        self.num_releases += 1


class LateFetch:
    """A copy that is ordered at once, and that nobody sees before `wait`. waiting: those that were not waited for."""

    waiting: list["LateFetch"] = []

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers.clone().numpy()
        LateFetch.waiting.append(self)

    def wait(self) -> np.ndarray:
        with suppress(ValueError):
            LateFetch.waiting.remove(self)
        return self._numbers


def as_on_a_device(
    engine: Engine, *, graphs: bool = True, runs_ahead: bool = True, capturer: CpuCapturer | None = None
) -> Engine:
    """Let an engine on a CPU decode as one on a GPU does: captured, one step ahead."""
    LateFetch.waiting.clear()
    engine.loop.use_decoder(DeviceDecoder(engine.debug.batch_runner, engine.scheduler, runs_ahead, fetch=LateFetch))
    if graphs:
        engine.debug.use_graphs(capturer or CpuCapturer())
        engine.warmup(lambda num: None)
    return engine
