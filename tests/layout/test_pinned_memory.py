"""Pinned memory takes the pages that were asked for, and is registered as long as it is mapped."""

import contextlib
import gc
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.pinned import FakeRegistrar

from kvpage import CacheLayout
from kvpage.layout import pinned_memory
from kvpage.layout.pinned_memory import PAGE_BYTES, CudaRegistrar, PinnedMemory, pinned_zeros, register_all

P = PAGE_BYTES


def whole(num_bytes: int) -> int:
    return -(-num_bytes // P) * P


@pytest.fixture
def registrar(monkeypatch: pytest.MonkeyPatch) -> FakeRegistrar:
    made = FakeRegistrar()
    monkeypatch.setattr(pinned_memory, "make_registrar", lambda: made)
    return made


@pytest.mark.parametrize("piece_bytes", [None, P, 3 * P])
@pytest.mark.parametrize("num_bytes", [0, 1, P - 1, P, P + 1, 3 * P, 7 * P + 5])
def test_the_registered_bytes_are_the_pages(registrar: FakeRegistrar, num_bytes: int, piece_bytes: int | None) -> None:
    (memory,) = pinned_zeros([(num_bytes,)], torch.uint8, "m", piece_bytes)
    assert memory.nbytes == num_bytes and sum(registrar.held.values()) == whole(num_bytes)
    pieces = sorted(registrar.held.items())
    ends = [address + count for address, count in pieces]
    assert [address for address, _ in pieces[1:]] == ends[:-1], "pieces are not neighbours"
    assert all(count == (piece_bytes or whole(num_bytes)) for _, count in pieces[:-1])
    if num_bytes:
        assert pieces[0][0] == memory.data_ptr() and memory.data_ptr() % (2 << 20) == 0 and not memory.any()
        memory.fill_(7)
    calls = [address for kind, address in registrar.calls if kind == "register"]
    del memory
    gc.collect()
    assert not registrar.held
    assert len(registrar.calls) == 2 * len(calls)


@pytest.mark.parametrize("layer_layout", ["separate", "packed"])
def test_a_host_tier_is_pinned_in_its_true_size(registrar: FakeRegistrar, layer_layout: str) -> None:
    """Nothing is rounded up to a power of two, and no tensor is registered in two pieces."""
    layout = CacheLayout(4, 2, 8, torch.bfloat16, layer_layout=layer_layout)
    caches = layout.allocate(37, 3, torch.device("cpu"), pin_memory=True)
    each = 37 * layout.block_bytes * (3 if layer_layout == "packed" else 1)
    num_tensors = 1 if layer_layout == "packed" else 3
    assert sorted(registrar.held.values()) == [whole(each)] * num_tensors
    expected = layout.allocate(37, 3, torch.device("cpu"))
    for cache, plain in zip(caches, expected, strict=True):
        assert cache.shape == plain.shape and cache.stride() == plain.stride() and torch.equal(cache, plain)
    kept = caches[1][:, 1]
    del caches, cache
    gc.collect()
    assert len(registrar.held) == 1, "a view keeps its memory alone"
    assert not kept.any()
    del kept
    gc.collect()
    assert not registrar.held


@pytest.mark.parametrize("failing", range(7))
def test_a_failure_at_any_piece_undoes_those_before(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    registrar = FakeRegistrar(failing_call=failing)
    monkeypatch.setattr(pinned_memory, "make_registrar", lambda: registrar)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with pytest.raises(OSError, match=f"m must have {2 * (3 * P + 1)} bytes that can be pinned, got less: the fake"):
        pinned_zeros([(3 * P + 1,)] * 2, torch.uint8, "m", P)
    assert not registrar.held
    registered = [address for kind, address in registrar.calls if kind == "register"]
    undone = [address for kind, address in registrar.calls if kind == "unregister"]
    assert failing <= len(undone) < len(registered) + 1 and set(undone) < set(registered)


def test_an_interrupt_undoes_all(registrar: FakeRegistrar) -> None:
    memory = PinnedMemory(5 * P, registrar, P)

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        register_all([memory], 2, interrupt)
    assert not registrar.held


def test_memory_that_stays_registered_stays_mapped(registrar: FakeRegistrar) -> None:
    (memory,) = pinned_zeros([(P,)], torch.uint8, "m")
    address, registrar.is_stuck = memory.data_ptr(), True
    del memory
    gc.collect()
    assert registrar.held and registrar.calls[-1] == ("unregister", address)
    registrar.is_stuck = False
    registrar.unregister(address)  # which reads the page


END = """
import os, sys, torch
from support.pinned import FakeRegistrar
from kvpage.layout import pinned_memory
registrar = FakeRegistrar()
unregister = registrar.unregister
registrar.unregister = lambda address: (unregister(address), print("unregistered", len(registrar.held), flush=True))
pinned_memory.make_registrar = lambda: registrar
(memory,) = pinned_memory.pinned_zeros([(5000,)], torch.uint8, "m")
memory.fill_(3)
"""


def run(code: str) -> list[str]:
    paths = [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{END}{code}"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_end_of_the_interpreter_and_a_fork() -> None:
    """A child unregisters nothing, and may let the memory go; the parent's is registered to the end, then not."""
    lines = run(
        "child = os.fork()\n"
        "if child == 0:\n"
        "    print('child', sorted(set(memory.tolist()))[0] in (0, 3), flush=True)\n"
        "    del memory\n"
        "    import gc; gc.collect()\n"
        "    raise SystemExit\n"
        "print('parent', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), memory.unique().tolist(), flush=True)\n"
    )
    assert lines == ["child True", "parent 0 [3]", "unregistered 0"]


class FakeRuntime:
    """torch.cuda's runtime, as far as CudaRegistrar uses it. codes: of the next calls."""

    def __init__(self) -> None:
        self.codes, self.calls = [0], []

    def cudaHostRegister(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return self.codes.pop(0)

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append((address,))
        return self.codes.pop(0)


def test_what_the_registrar_asks_cuda_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, entered = FakeRuntime(), []

    @contextlib.contextmanager
    def device(chosen: torch.device):
        entered.append(chosen)
        yield

    contexts = {2}
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index in contexts, raising=False)
    taken, waited = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: taken.append(device))
    registrar = CudaRegistrar()
    registrar.register(3 * P, P)
    assert runtime.calls == [(3 * P, P, 3)] and entered == [torch.device("cuda", 2)], "no context is made on device 0"
    runtime.codes = [2, 1]
    with pytest.raises(OSError, match="cudaHostRegister of 4096 bytes has returned error 2"):
        registrar.register(0, 4096)
    with pytest.raises(OSError, match="cudaHostUnregister has returned error 1"):
        registrar.unregister(0)
    assert waited == [2], "a copy may be under way"
    assert taken == [torch.device("cuda", 2)] * 2, "the error is left to the next launch of torch's"
    contexts |= {0}
    assert CudaRegistrar()._device == torch.device("cuda", 0)
    contexts.clear()
    assert CudaRegistrar()._device == torch.device("cuda", 0)


def test_memory_of_a_child_is_not_shared(registrar: FakeRegistrar) -> None:
    """Where the system knows how: a page that both had would be copied when the parent writes it, and a GPU's copies
    would go on to the old one."""
    (memory,) = pinned_zeros([(P,)], torch.uint8, "m")
    flags = _flags_of(memory.data_ptr())
    if flags is None or "wf" not in flags:
        pytest.skip("this system does not wipe memory on a fork")


def _flags_of(address: int) -> list[str] | None:
    if not os.path.exists("/proc/self/smaps"):
        return None
    found, is_mine = None, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            head = line.split()[0]
            if "-" in head and ":" not in head:
                begin, end = (int(part, 16) for part in head.split("-"))
                is_mine = begin <= address < end
            elif is_mine and head == "VmFlags:":
                found = line.split()[1:]
    return found


def test_an_array_of_it_keeps_it(registrar: FakeRegistrar) -> None:
    memory = PinnedMemory(P, registrar)
    register_all([memory], 1, lambda count: None)
    array = np.asarray(memory)
    del memory
    gc.collect()
    assert registrar.held and not array.any()
    del array
    gc.collect()
    assert not registrar.held


@pytest.mark.gpu
def test_copies_of_a_gpu() -> None:
    """Registered pages are pinned for torch, and every byte of them goes there and back."""
    (memory,) = pinned_zeros([(9 * P + 5,)], torch.uint8, "m", 4 * P)
    assert memory.is_pinned() and memory[-1:].is_pinned()
    expected = torch.arange(len(memory), dtype=torch.int64).remainder(251).to(torch.uint8)
    memory.copy_(expected)
    back = torch.zeros_like(expected)
    for begin in range(0, len(memory), 4 * P):  # within a piece each
        piece = slice(begin, begin + 4 * P)
        on_device = memory[piece].to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        memory[piece].fill_(0)
        memory[piece].copy_(on_device, non_blocking=True)
        torch.cuda.synchronize()
        back[piece] = memory[piece]
    assert torch.equal(back, expected)
    layout = CacheLayout(4, 2, 8, torch.bfloat16)
    assert all(cache.is_pinned() for cache in layout.allocate(5, 3, torch.device("cpu"), pin_memory=True))
