"""BlockCopier: moves blocks between two caches whose layers have the same shapes, all layers at once.

    pairs of block ids ─► CopyPlan ─► host threads    CPU    ─► CPU
                          (csrc)      copy engines    CPU    ─► CUDA, CUDA ─► CPU
                                      kernel          CUDA   ─► CUDA (one device), and the way between CUDA and pinned
                                                                memory for many small extents

The tensors are checked once; each call then only checks its pairs. In a build without CUDA, or with a driver that it
cannot use, torch operations copy CUDA tensors, with one warning.
"""

import warnings
from collections.abc import Sequence

import torch

import kvpage._C as _C
from kvpage.checks.tensors import check_dense, readable, tensor_list
from kvpage.layout.cache_layout import CacheLayout, check_layout
from kvpage.ops import reference

HOST = -1
_NO_LAYOUT = CacheLayout(1, 1, 1, torch.uint8)  # of a copier without layers
MAX_GROUPS = 16


class BlockCopier:
    """Copies blocks of `srcs` to blocks of `dsts`, in all layers at once.

    The two sides may differ in number of blocks, in strides (packed and separate, NHD and HND) and in device. The
    copier holds the tensors themselves. They must keep their memory while it lives.

    Args:
        srcs: Caches to read, one tensor a layer, of its layout's generic shape.
        dsts: Caches to write, likewise.
        layout: How the tensors of both sides are to be read: one for all layers, or a sequence with one for each.
        kernel_max_bytes: Between CUDA and pinned memory, a kernel copies extents of up to that many bytes on average,
            all in one launch. The copy engines copy larger ones. With 0 they copy all. `kvpage.calibrate` finds the
            best limit.
        max_groups: Groups of 256 threads that this kernel may take. A multiprocessor holds at most eight.

    Raises:
        TypeError: `srcs` or `dsts` are not tensors, or a layout is no CacheLayout.
        ValueError: A tensor is not of its layout, or layouts are of several dtypes. A side is on several devices, or
            the two are on two CUDA devices. The numbers of layers differ. A destination overlaps itself, or the sides
            overlap without being the same caches.
            `kernel_max_bytes` is negative, or `max_groups` below 1.
    """

    def __init__(
        self,
        srcs: Sequence[torch.Tensor],
        dsts: Sequence[torch.Tensor],
        layout: CacheLayout | Sequence[CacheLayout],
        kernel_max_bytes: int = 0,
        max_groups: int = MAX_GROUPS,
    ) -> None:
        self._srcs, self._dsts = tensor_list("src", srcs), tensor_list("dst", dsts)
        self._layouts, self._is_uniform = _layouts(layout, len(self._srcs))
        self._limits = kernel_max_bytes, max_groups
        self._layers: list[BlockCopier] | None = None
        if len(self._srcs) != len(self._dsts):
            raise ValueError(f"src and dst must have as many layers, got {len(self._srcs)} and {len(self._dsts)}")
        self._num_blocks = _num_blocks("src", self._srcs, self._layouts), _num_blocks("dst", self._dsts, self._layouts)
        src, dst = _device("src", self._srcs), _device("dst", self._dsts)
        if src.type == "cuda" and dst.type == "cuda" and src != dst:
            raise ValueError(f"src and dst must be on one CUDA device or one of them on the CPU, got {src} and {dst}")
        self._cuda = dst if dst.type == "cuda" else src if src.type == "cuda" else None
        usable = self._cuda is None or _native_cuda()
        # Without the native part a plan between host addresses still checks the pairs, and is never run.
        places = (_device_index(src), _device_index(dst)) if usable else (HOST, HOST)
        self._torch_only = not usable
        self._native = self._make_native(places)

    def run(self, block_mapping: torch.Tensor) -> None:
        """Copy block s of the sources to block d of the destinations, in all layers, for each row (s, d).

        On the CPU the copy is done on return. On CUDA it is ordered on the current stream and not waited for. Host
        tensors must be pinned for that; with pageable ones the call may block. Tensors must stay until the stream has
        passed.

        Args:
            block_mapping: int64 [num_pairs, 2] on the CPU, in any order; it may be empty. It is not needed after the
                call.

        Raises:
            TypeError: `block_mapping` is no tensor.
            ValueError: With nothing written: an id is out of range, or a destination is named twice. Within one cache,
                one row reads a block that another writes; a row of a block with itself is harmless. Or the stream
                captures a graph.
            RuntimeError: CUDA fails. The destination blocks are then undefined.
        """
        pairs = _pairs(block_mapping)
        if self._torch_only:
            self._run_reference(pairs)
            return
        stream = 0 if self._cuda is None else torch.cuda.current_stream(self._cuda).cuda_stream
        self._native.run(pairs.data_ptr(), len(pairs), stream, torch.get_num_threads())

    def check(self, block_mapping: torch.Tensor) -> None:
        """Check a mapping as `run` does, and copy nothing.

        Args:
            block_mapping: As in `run`.

        Raises:
            TypeError: As in `run`.
            ValueError: As in `run`, for a bad mapping.
        """
        pairs = _pairs(block_mapping)
        self._native.check(pairs.data_ptr(), len(pairs))

    def executor(self, block_mapping: torch.Tensor) -> str:
        """Return the executor with which `run` would copy this mapping.

        Args:
            block_mapping: As in `run`.

        Returns:
            "host", "engine", "kernel" or, without native CUDA, "torch".

        Raises:
            TypeError: As in `run`.
            ValueError: As in `run`, for a bad mapping.
        """
        pairs = _pairs(block_mapping)
        name = self._native.executor(pairs.data_ptr(), len(pairs))
        return "torch" if self._torch_only else name

    def split_layers(self) -> list["BlockCopier"]:
        """Return copiers of one layer each, in the order of the layers, with this copier's limits. They are made
        once."""
        if self._layers is None:
            layers = zip(self._srcs, self._dsts, self._layouts, strict=True)
            self._layers = [BlockCopier([src], [dst], layout, *self._limits) for src, dst, layout in layers]
        return self._layers

    def _make_native(self, places: tuple[int, int]) -> _C.BlockCopier:
        host = [cache for cache in (*self._srcs, *self._dsts) if cache.device.type == "cpu"]
        num_src_blocks, num_dst_blocks = self._num_blocks
        first = self._layouts[0] if self._layouts else _NO_LAYOUT
        shapes = [] if self._is_uniform else [(layout.shape(1), layout.block_dim) for layout in self._layouts]
        return _C.BlockCopier(
            sizes=first.shape(1),
            block_dim=first.block_dim,
            element_bytes=first.dtype.itemsize,
            srcs=[_layer(cache) for cache in self._srcs],
            dsts=[_layer(cache) for cache in self._dsts],
            num_src_blocks=num_src_blocks,
            num_dst_blocks=num_dst_blocks,
            src_device=places[0],
            dst_device=places[1],
            pinned=self._cuda is not None and all(cache.is_pinned() for cache in host),
            kernel_max_bytes=self._limits[0],
            max_groups=self._limits[1],
            shapes=shapes,
        )

    def _run_reference(self, pairs: torch.Tensor) -> None:
        self._native.check(pairs.data_ptr(), len(pairs))
        for src, dst, layout in zip(self._srcs, self._dsts, self._layouts, strict=True):
            reference.swap_blocks(src, dst, pairs, layout)


def swap_blocks(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    """Copy block s of `src` to block d of `dst`, in one layer, for each row (s, d) of the mapping.

    Args:
        src: The cache to read, of the layout's generic shape.
        dst: The cache to write. It may differ from `src` in number of blocks, strides and device.
        block_mapping: int64 [num_pairs, 2] on the CPU.
        layout: The layout of both.

    Raises:
        TypeError: As in `BlockCopier` and its `run`, which also say what must stay alive.
        ValueError: As in `BlockCopier` and its `run`.
        RuntimeError: CUDA fails. The destination blocks are then undefined.
    """
    BlockCopier([src], [dst], layout).run(block_mapping)


def swap_blocks_layers(
    srcs: Sequence[torch.Tensor], dsts: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout
) -> None:
    """Copy blocks as `swap_blocks` does, in all layers with one plan.

    For many swaps between the same caches, hold a `BlockCopier` instead.

    Args:
        srcs: Caches to read, one a layer.
        dsts: Caches to write, one a layer.
        block_mapping: As in `swap_blocks`.
        layout: The layout of all.

    Raises:
        TypeError: As in `swap_blocks`.
        ValueError: As in `swap_blocks`.
        RuntimeError: As in `swap_blocks`.
    """
    BlockCopier(srcs, dsts, layout).run(block_mapping)


def copy_blocks(caches: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    """Copy block s to block d within the same caches, in all layers with one plan, for each row (s, d) of the mapping.

    Args:
        caches: The caches, one a layer.
        block_mapping: int64 [num_pairs, 2] on the CPU.
        layout: The layout of all.

    Raises:
        TypeError: As in `swap_blocks`.
        ValueError: As in `swap_blocks`, or one row reads a block that another writes. Nothing is written then.
        RuntimeError: As in `swap_blocks`.
    """
    BlockCopier(caches, caches, layout).run(block_mapping)


def _pairs(block_mapping: torch.Tensor) -> torch.Tensor:
    check_block_mapping(block_mapping)
    return readable("block_mapping", block_mapping).contiguous()


def check_block_mapping(block_mapping: torch.Tensor) -> None:
    """Raise TypeError or ValueError unless it is an int64 tensor [num_pairs, 2] on the CPU."""
    check_dense("block_mapping", block_mapping)
    if block_mapping.dtype != torch.int64:
        raise ValueError(f"block_mapping.dtype must be torch.int64, got {block_mapping.dtype}")
    if block_mapping.device.type != "cpu":
        raise ValueError(f"block_mapping must be on the CPU, got {block_mapping.device}")
    if block_mapping.dim() != 2 or block_mapping.shape[1] != 2:
        raise ValueError(f"block_mapping.shape must be [num_pairs, 2], got {list(block_mapping.shape)}")


def _layouts(layout: CacheLayout | Sequence[CacheLayout], num_layers: int) -> tuple[list[CacheLayout], bool]:
    """Return the layout of each layer, and whether all are alike."""
    if not isinstance(layout, Sequence):
        check_layout(layout)
        return [layout] * num_layers, True
    for layer_layout in layout:
        check_layout(layer_layout)
    dtypes = sorted({str(layer_layout.dtype) for layer_layout in layout})
    if len(layout) != num_layers or len(dtypes) > 1:
        rule = f"layout must be one for each of {num_layers} layers, all of one dtype"
        raise ValueError(f"{rule}, got {len(layout)} of {', '.join(dtypes)}")
    return list(layout), len(set(layout)) <= 1


def _num_blocks(name: str, caches: list[torch.Tensor], layouts: Sequence[CacheLayout]) -> int:
    counts = set()
    for layer, (cache, layout) in enumerate(zip(caches, layouts, strict=True)):
        layout.validate(cache, f"{name}[{layer}]")
        counts.add(cache.shape[layout.block_dim])
    if len(counts) > 1:
        raise ValueError(f"{name} must have as many blocks in each layer, got {sorted(counts)}")
    return counts.pop() if counts else 0


def _device(name: str, caches: list[torch.Tensor]) -> torch.device:
    devices = {cache.device for cache in caches}
    if len(devices) > 1:
        raise ValueError(f"{name} must be on one device, got {', '.join(sorted(map(str, devices)))}")
    device = devices.pop() if devices else torch.device("cpu")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on the CPU or a CUDA device, got {device}")
    return device


def _device_index(device: torch.device) -> int:
    return HOST if device.type == "cpu" else device.index


def _layer(cache: torch.Tensor) -> tuple[int, list[int]]:
    return cache.data_ptr(), [stride * cache.element_size() for stride in cache.stride()]


def _native_cuda() -> bool:
    """Return whether the native part can use CUDA here. If it cannot, warn; Python shows a warning once."""
    error = _C.cuda_error()
    if error is None:
        return True
    warnings.warn(f"kvpage moves blocks on CUDA with torch operations: {error}", RuntimeWarning, stacklevel=1)
    return False
