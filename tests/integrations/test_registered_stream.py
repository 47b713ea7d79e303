"""Copies between raw addresses on the legacy null stream: one side stream a device, made once, ordered both ways."""

import contextlib

import numpy as np
import pytest
import torch

from kvpage.integrations.vllm_ops import registered_memory
from kvpage.integrations.vllm_ops.registered_memory import RegisteredMemory


class PlayedCuda:
    """torch.cuda as far as it is used: a log of what each stream was told. current: handle of the current stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, current: int) -> None:
        self.log, self.num_made, self.is_failing = [], {"streams": 0, "events": 0}, False
        played = self

        class Stream:
            def __init__(self, device: torch.device, handle: int = 77) -> None:
                self.cuda_stream = handle
                played.num_made["streams"] += handle == 77

            def wait_event(self, event: object) -> None:
                played.log.append((self.cuda_stream, "waits for", event.at))

        class Event:
            def __init__(self) -> None:
                played.num_made["events"] += 1

            def record(self, stream: Stream) -> None:
                self.at = stream.cuda_stream

        class Copier:
            def run(self, pairs: int, num_pairs: int, stream: int, num_threads: int) -> None:
                played.log.append((stream, "copies"))
                if played.is_failing:
                    raise RuntimeError("a copy has failed")

        cuda = torch.device("cuda", 0)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, current))
        monkeypatch.setattr(registered_memory, "_native_cuda", lambda: True)
        monkeypatch.setattr(registered_memory, "_copier", lambda *arguments: Copier())
        places = {"src_ptrs": torch.device("cpu"), "dst_ptrs": cuda}
        monkeypatch.setattr(registered_memory, "_device", lambda name, used, regions: places[name])


def copy_once(memory: RegisteredMemory, tensors: list[torch.Tensor]) -> None:
    src, dst = (np.array([tensor.data_ptr()], np.int64) for tensor in tensors)
    memory.copy(src, dst, np.array([8], np.int64))


@pytest.fixture
def memory() -> tuple[RegisteredMemory, list[torch.Tensor]]:
    tensors = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    made = RegisteredMemory()
    made.register(tensors)
    return made, tensors


ORDERED = [(77, "waits for", 0), (77, "copies"), (0, "waits for", 77)]


def test_the_side_stream_is_made_once(memory, monkeypatch) -> None:
    cuda = PlayedCuda(monkeypatch, current=0)
    for _ in range(5):
        copy_once(*memory)
    assert cuda.log == ORDERED * 5 and cuda.num_made == {"streams": 1, "events": 2}


def test_the_null_stream_goes_on_after_a_failed_copy(memory, monkeypatch) -> None:
    """Copies that were enqueued before it still run."""
    cuda = PlayedCuda(monkeypatch, current=0)
    cuda.is_failing = True
    with pytest.raises(RuntimeError, match="a copy has failed"):
        copy_once(*memory)
    assert cuda.log == ORDERED
    cuda.is_failing = False
    copy_once(*memory)
    assert cuda.log == ORDERED * 2


def test_other_streams_need_none(memory, monkeypatch) -> None:
    cuda = PlayedCuda(monkeypatch, current=5)
    copy_once(*memory)
    assert cuda.log == [(5, "copies")] and cuda.num_made == {"streams": 0, "events": 0}
