"""RegisteredMemory: the raw addresses that may be copied from and to, and the copies.

registered tensors        [ 0x7f00 ────── ) [ 0x8200 ───────── )   [ 0xa000 ── )        on one device or the host
extents (src, dst, size)     ├──┤              ├─────┤                 ├──────┤ ✗ ends outside: nothing is copied
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

import kvpage._C as _C
from kvpage.ops.copies import HOST, MAX_GROUPS, _native_cuda

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Region:
    """Addresses [begin, end) and the tensors there. It holds the tensors, which keeps the memory alive."""

    begin: int
    end: int
    tensors: tuple[torch.Tensor, ...]

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def bytes_at(self, address: int, size: int) -> torch.Tensor:
        """Return a view of `size` bytes from the address on."""
        for tensor in self.tensors:
            storage, memory = tensor.untyped_storage(), torch.empty(0, dtype=torch.uint8, device=tensor.device)
            offset = address - storage.data_ptr()
            if 0 <= offset <= storage.nbytes() - size:
                return memory.set_(storage, offset, (size,), (1,))
        raise ValueError(f"{size} bytes from {address:#x} on must be in the memory of one tensor")


@dataclass(frozen=True, slots=True)
class _Extents:
    """Addresses and sizes in bytes, [n] each, and the index of the region of each address."""

    srcs: _Integers
    dsts: _Integers
    sizes: _Integers
    src_regions: _Integers
    dst_regions: _Integers

    def select(self, chosen: npt.NDArray[np.bool_]) -> "_Extents":
        parts = (self.srcs, self.dsts, self.sizes, self.src_regions, self.dst_regions)
        return _Extents(*(part[chosen] for part in parts))


class _SideStream:
    """A stream for the copies of the legacy null stream, which refuses them, and the events that order both.

    They are made once: the driver would make them again in every call otherwise.
    """

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]  # not annotated
        with torch.cuda.device(device):
            self._before, self._after = _event(), _event()

    def run(self, copies: Sequence[Callable[[int], None]], current: torch.cuda.Stream) -> None:
        """Enqueue copies between the work that `current` has and the work that it gets later, also after an error."""
        with self._lock:
            self._before.record(current)
            self._stream.wait_event(self._before)
            try:
                for copy in copies:
                    copy(self._stream.cuda_stream)
            finally:
                self._after.record(self._stream)
                current.wait_event(self._after)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it


class RegisteredMemory:
    """A set of tensors whose memory may be addressed. It holds them until they are unregistered. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: Counter[tuple[int, int]] = Counter()
        self._tensors: dict[tuple[int, int], torch.Tensor] = {}
        self._regions: list[_Region] = []
        self._sides: dict[torch.device, _SideStream] = {}

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allow copies from and to the memory from each tensor's first element to its last.

        A tensor that is registered twice has to be unregistered twice.

        Args:
            tensors: Tensors on the CPU or a CUDA device.

        Raises:
            TypeError: One of them is no tensor.
            ValueError: One of them is on another device.
        """
        spans = [_span(tensor) for tensor in tensors]
        with self._lock:
            self._spans.update(spans)
            self._tensors.update(zip(spans, tensors, strict=True))
            self._merge()

    def unregister(self, tensors: Sequence[torch.Tensor]) -> None:
        """Undo one registration of each tensor.

        Args:
            tensors: Tensors that are registered.

        Raises:
            TypeError: One of them is no tensor.
            ValueError: One of them is not registered. Nothing is changed.
        """
        spans = [_span(tensor) for tensor in tensors]
        with self._lock:
            for span, count in Counter(spans).items():
                if self._spans[span] < count:
                    raise ValueError(f"tensors must be registered, the one at {span[0]:#x} is not")
            self._spans.subtract(spans)
            for span in {span for span in spans if self._spans[span] == 0}:
                del self._spans[span], self._tensors[span]
            self._merge()

    def copy(self, srcs: _Integers, dsts: _Integers, sizes: _Integers) -> None:
        """Copy sizes[i] bytes from srcs[i] to dsts[i], for all i. On CUDA it is ordered on the current stream.

        Raises:
            ValueError: An extent is not inside registered memory. Destinations overlap each other or a source. Sources
                (or destinations) are on more than one device. Nothing is copied.
        """
        with self._lock:
            regions = list(self._regions)
        if len(sizes) and sizes.min() < 0:
            raise ValueError(f"sizes must not be negative, got {sizes.min()}")
        chosen = (sizes > 0) & (srcs != dsts)
        src_regions, dst_regions = _find("src_ptrs", srcs, sizes, regions), _find("dst_ptrs", dsts, sizes, regions)
        extents = _Extents(srcs, dsts, sizes, src_regions, dst_regions).select(chosen)
        if len(extents.sizes):
            _check_overlap(extents)
            self._copy(extents, regions)

    def bytes_from(self, name: str, address: int) -> torch.Tensor:
        """Return a view, uint8 [num_bytes], of the registered memory from the address to the end of its region.

        Args:
            name: The argument that holds the address, for the error.
            address: An address in registered memory.

        Raises:
            ValueError: The address is not in registered memory.
        """
        with self._lock:
            regions = list(self._regions)
        size = np.ones(1, np.int64)
        region = regions[int(_find(name, size * address, size, regions)[0])]
        begins = [(tensor, tensor.untyped_storage().data_ptr()) for tensor in region.tensors]
        ends = [begin + tensor.untyped_storage().nbytes() for tensor, begin in begins if begin <= address]
        return region.bytes_at(address, min(region.end, max(ends)) - address)

    def _copy(self, extents: _Extents, regions: list[_Region]) -> None:
        src = _device("src_ptrs", extents.src_regions, regions)
        dst = _device("dst_ptrs", extents.dst_regions, regions)
        if src.type == dst.type == "cuda" and src != dst:
            raise ValueError(f"src_ptrs and dst_ptrs must be on one CUDA device, got {src} and {dst}")
        cuda = dst if dst.type == "cuda" else src if src.type == "cuda" else None
        if cuda is not None and not _native_cuda():
            _copy_by_torch(extents, regions)
            return
        used = np.unique(np.concatenate([extents.src_regions, extents.dst_regions]))
        host = [regions[index].tensors[0] for index in used if regions[index].device.type == "cpu"]
        pinned = cuda is not None and all(tensor.is_pinned() for tensor in host)
        copies = [partial(_run, _copier(part, src, dst, pinned)) for part in _parts(extents)]
        current = None if cuda is None else torch.cuda.current_stream(cuda)
        if current is not None and current.cuda_stream == 0 and src.type != dst.type:
            self._side(src if src.type == "cuda" else dst).run(copies, current)
            return
        for copy in copies:
            copy(0 if current is None else current.cuda_stream)

    def _side(self, device: torch.device) -> _SideStream:
        with self._lock:
            if device not in self._sides:
                self._sides[device] = _SideStream(device)
            return self._sides[device]

    def _merge(self) -> None:
        """Make one region of spans that overlap, as spans of layers in one slab do."""
        self._regions = []
        for begin, end in sorted(self._spans):
            tensors: tuple[torch.Tensor, ...] = (self._tensors[begin, end],)
            if self._regions and begin < self._regions[-1].end:
                last = self._regions.pop()
                begin, end, tensors = last.begin, max(last.end, end), last.tensors + tensors
            self._regions.append(_Region(begin, end, tensors))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte, and the address after the last."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensors must be torch.Tensor, got {type(tensor).__name__}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"tensors must be on the CPU or a CUDA device, got {tensor.device}")
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _find(name: str, addresses: _Integers, sizes: _Integers, regions: list[_Region]) -> _Integers:
    """Return each extent's region. Raise ValueError for an extent in none; an extent of no bytes may be anywhere."""
    begins, ends = (np.array([getattr(region, end) for region in regions], np.int64) for end in ("begin", "end"))
    indices = np.searchsorted(begins, addresses, side="right") - 1
    known = np.append(ends, 0)[indices] - addresses >= sizes  # of -1, the appended end: before every region
    bad = ~known & (sizes > 0)
    if bad.any():
        index = int(bad.argmax())
        raise ValueError(
            f"{name} must name registered memory, {sizes[index]} bytes from {addresses[index]:#x} on are not inside"
        )
    return indices


def _check_overlap(extents: _Extents) -> None:
    order = np.argsort(extents.dsts)
    begins, ends = extents.dsts[order], (extents.dsts + extents.sizes)[order]
    if (begins[1:] < ends[:-1]).any():
        raise ValueError("dst_ptrs must not overlap, a byte is the destination of two copies")
    before = np.searchsorted(begins, extents.srcs + extents.sizes) - 1  # the last destination that begins in time
    if ((before >= 0) & (ends[before] > extents.srcs)).any():
        raise ValueError("src_ptrs and dst_ptrs must not overlap, a byte is both source and destination")


def _run(copier: _C.BlockCopier, stream: int) -> None:
    pair = np.zeros(2, np.int64)
    copier.run(pair.ctypes.data, 1, stream, torch.get_num_threads())


def _device(name: str, used: _Integers, regions: list[_Region]) -> torch.device:
    devices: set[torch.device] = {regions[index].device for index in np.unique(used).tolist()}
    if len(devices) > 1:
        raise ValueError(f"{name} must be on one device, got {', '.join(sorted(map(str, devices)))}")
    return devices.pop()


def _parts(extents: _Extents) -> list[_Extents]:
    """Split the extents into groups for one plan each: of one size, with sources that share no byte."""
    kinds = np.stack([extents.sizes, _rounds(extents)])
    return [extents.select((kinds == kind[:, None]).all(0)) for kind in np.unique(kinds, axis=1).T]


def _rounds(extents: _Extents) -> _Integers:
    """Return a number for each extent. Sources that share a byte have different numbers."""
    order = np.argsort(extents.srcs)
    begins, ends = extents.srcs[order], (extents.srcs + extents.sizes)[order]
    rounds = np.zeros(len(order), np.int64)
    if (begins[1:] >= ends[:-1]).all():
        return rounds
    last_ends: list[int] = []  # of each round
    for index, begin, end in zip(order.tolist(), begins.tolist(), ends.tolist(), strict=True):
        free = next((number for number, last in enumerate(last_ends) if begin >= last), len(last_ends))
        last_ends[free : free + 1] = [end]
        rounds[index] = free
    return rounds


def _copier(extents: _Extents, src: torch.device, dst: torch.device, pinned: bool) -> _C.BlockCopier:
    """Return a plan of one block whose layers are the extents, all of one size.

    The plan has no second block. So each layer's step to it is free to distinguish regions: only neighbours of equal
    steps are merged, and a copy must not cross the border of two allocations.
    """

    def layers(addresses: _Integers, regions: _Integers) -> list[tuple[int, list[int]]]:
        steps = (16 * (regions + 1)).tolist()
        return [(address, [step, 1]) for address, step in zip(addresses.tolist(), steps, strict=True)]

    return _C.BlockCopier(
        sizes=[1, int(extents.sizes[0])],
        block_dim=0,
        element_bytes=1,
        srcs=layers(extents.srcs, extents.src_regions),
        dsts=layers(extents.dsts, extents.dst_regions),
        num_src_blocks=1,
        num_dst_blocks=1,
        src_device=HOST if src.type == "cpu" else src.index,
        dst_device=HOST if dst.type == "cpu" else dst.index,
        pinned=pinned,
        kernel_max_bytes=0,
        max_groups=MAX_GROUPS,
    )


def _copy_by_torch(extents: _Extents, regions: list[_Region]) -> None:
    parts = (extents.srcs, extents.dsts, extents.sizes, extents.src_regions, extents.dst_regions)
    for src, dst, size, src_region, dst_region in zip(*(part.tolist() for part in parts), strict=True):
        source = regions[src_region].bytes_at(src, size)
        regions[dst_region].bytes_at(dst, size).copy_(source, non_blocking=True)


REGISTERED = RegisteredMemory()  # of the process, as raw addresses are
