"""CacheEngine: owns the cache tensors of the device tier and the host tier, and copies blocks within and between them.

It knows block ids. It knows nothing of tokens, of sequences or of the owners of blocks: the block manager does.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal, overload

import torch

import kvpage._C as _C
from kvpage.blocks.moves import BlockMove
from kvpage.cache.calibration import Calibration, calibrate
from kvpage.cache.copiers import Copier, device_copier, no_copier, swap_copier
from kvpage.cache.layered_moves import Arrival, LayeredMoves, PieceCopiers
from kvpage.cache.transfer import BlockPins, OnDone, Pools, Transfer, TransferQueue
from kvpage.cache.transfer_stream import TransferStream, open_stream
from kvpage.checks.values import check_flag
from kvpage.layout.cache_layout import CacheLayout, allocate_layers
from kvpage.layout.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    cache_block_bytes,
    check_configs,
)
from kvpage.layout.kv_scales import KVScales
from kvpage.ops.args.bound_cache import BoundCache
from kvpage.ops.args.tokens import check_scales
from kvpage.ops.cuda.served import check_served


class CacheEngine:
    """The caches of one rank.

    The tensors live as long as the engine. A swap or copy on a GPU is ordered on the current stream, and the host does
    not wait for it. Each raises as `BlockCopier.run` does, before anything is written. A backend's own
    `swap_blocks` or `copy_blocks` checks the ids itself.

    With non_blocking=True a swap runs beside the computation, on one stream of the engine's own (on a CPU: one thread).
    It comes after earlier swaps and after the work that the current stream has at the call. It returns a `Transfer`.
    Every other swap or copy comes after the transfers in flight.

    Attributes:
        gpu_cache: One tensor for each layer of this pipeline stage that has K and V of its own, zeroed, in the generic
            shape of its layout. Its strides follow the stride order and the layer layout. On a CPU device it is
            the device tier in host memory.
        cpu_cache: The same for the host tier. Beside a GPU it is pinned, in huge pages where the system has them. It
            takes its blocks' bytes, each tensor rounded up to whole pages, and is there when the engine is made.
        layer_ids: The layer in the whole model of each entry of these lists.
        layouts: The layout of each entry. Heads and sizes may differ.
        shared_layers: Layers that attend over the K and V of one of these, by their number in the whole model, with it.
        kv_scales: The scales of each layer, or None.
        numerics: The name of what computes K and V bit by bit; empty where their bits are not promised.

    Args:
        cache_config: Layout and numbers of blocks.
        model_config: Layers, heads and sizes.
        parallel_config: The rank; by default the only one.
        device_config: The device; by default the CPU.
        calibration: When swaps on a GPU are copied by its kernel. By default `kvpage.calibrate` measures it, once per
            device and process, before the caches are allocated.
        make_stream: Makes the stream of asynchronous swaps for a device. The engine keeps it to its end, and it must
            not keep the engine.
        kv_scales: Scales of 8-bit floats, one a layer; None means 1. They stay as long as the engine lives: every block
            that was written with them is read with them.

    Raises:
        TypeError: A config is of another type.
        ValueError: Configs do not fit together, or the layout does not take the scales. The GPU is none of NVIDIA's, or
            its compute capability is less than 8.0.
        OSError: The system has too little memory for the host tier, or cannot pin it.
    """

    def __init__(
        self,
        cache_config: CacheConfig,
        model_config: ModelConfig,
        parallel_config: ParallelConfig | None = None,
        device_config: DeviceConfig | None = None,
        *,
        calibration: Calibration | None = None,
        make_stream: Callable[[torch.device], TransferStream] = open_stream,
        kv_scales: Sequence[KVScales] | None = None,
    ) -> None:
        check_configs(cache_config, model_config, parallel_config, device_config)
        if calibration is not None and not isinstance(calibration, Calibration):
            raise TypeError(f"calibration must be a Calibration, got {type(calibration).__name__}")
        parallel_config = parallel_config or ParallelConfig()
        self.device = torch.device((device_config or DeviceConfig()).device)
        check_served(self.device)
        self.num_gpu_blocks = cache_config.num_gpu_blocks // parallel_config.pipeline_parallel_size
        self.num_cpu_blocks = cache_config.num_cpu_blocks // parallel_config.pipeline_parallel_size
        self.layer_ids = model_config.attention_layers(parallel_config)
        self.layouts: tuple[CacheLayout, ...] = ()
        self.shared_layers = {layer: source for layer, source in model_config.shared_layers if source in self.layer_ids}
        self._bound_caches: tuple[BoundCache, ...] | None = None
        self._bound_layers: dict[int, BoundCache] | None = None
        self._block_bytes = 0  # in all layers
        self.gpu_cache: list[torch.Tensor] = []
        self.cpu_cache: list[torch.Tensor] = []
        self._swap_in = self._swap_out = self._copy = no_copier()
        self._piece_copiers = PieceCopiers({})
        if self.layer_ids:
            self._allocate(tuple(cache_config.layouts(model_config, parallel_config)), calibration)
        self.kv_scales = None if kv_scales is None else tuple(kv_scales)
        self.numerics = ""
        self._check_kv_scales()
        device = self.gpu_cache[0].device if self.gpu_cache else self.device  # with its index
        self._transfers = TransferQueue(partial(make_stream, device))
        weakref.finalize(self, self._transfers.abandon)  # also before the interpreter ends

    @property
    def layout(self) -> CacheLayout:
        """The layout of the first layer, in both tiers. All others have its dtype, and blocks of as many tokens.

        Raises:
            ValueError: This stage has no attention layer.
        """
        if not self.layouts:
            raise ValueError("layout needs a stage with attention layers, this one has none")
        return self.layouts[0]

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have one layout, and each layer that attends has K and V of its own."""
        return len(set(self.layouts)) <= 1 and not self.shared_layers

    @property
    def bound_caches(self) -> tuple[BoundCache, ...]:
        """The device tier's caches, each bound to its layout and scales when they are first asked for.

        ValueError where the backend defines neither split_kv nor kv_views.
        """
        if self._bound_caches is None:
            each_scales = self.kv_scales or (None,) * len(self.gpu_cache)
            self._bound_caches = tuple(
                BoundCache(cache, layout, scales)
                for cache, layout, scales in zip(self.gpu_cache, self.layouts, each_scales, strict=True)
            )
        return self._bound_caches

    @property
    def bound_layers(self) -> dict[int, BoundCache]:
        """The same by the layer in the whole model, ascending. A layer that shares another's K and V has that one's."""
        if self._bound_layers is None:
            by_layer = dict(zip(self.layer_ids, self.bound_caches, strict=True))
            shared = {layer: by_layer[source] for layer, source in self.shared_layers.items()}
            self._bound_layers = dict(sorted({**by_layer, **shared}.items()))
        return self._bound_layers

    @overload
    def swap_in(self, src_to_dst: torch.Tensor, non_blocking: Literal[False] = False) -> None: ...
    @overload
    def swap_in(
        self,
        src_to_dst: torch.Tensor,
        non_blocking: Literal[True],
        *,
        pools: Pools = ...,
        on_done: OnDone | None = ...,
        by_layer: bool = ...,
    ) -> Transfer: ...
    def swap_in(
        self,
        src_to_dst: torch.Tensor,
        non_blocking: bool = False,
        *,
        pools: Pools = (None, None),
        on_done: OnDone | None = None,
        by_layer: bool = False,
    ) -> Transfer | None:
        """Copy host blocks to device blocks in all layers.

        Args:
            src_to_dst: int64 [num_pairs, 2] on the CPU, (host block, device block).
            non_blocking: Return a Transfer at once instead of None. The other arguments need it.
            pools: The host's and the device's BlockPool. Blocks get one more reference in them until the transfer is
                done. None leaves a side to the caller. Blocks cached by a tree cannot be shared: hold their Match
                instead, and release it in `on_done`.
            on_done: Called with the transfer, once, after the pins are given back, by the thread that finds it done or
                failed. It must not wait for another thread that uses the transfer. `wait` raises its errors.
            by_layer: Whether each layer can be waited for alone. It costs a copy a layer, instead of one for all.

        Returns:
            The Transfer, or None without non_blocking.

        Raises:
            ValueError: An id is out of range, a destination is named twice, or an argument needs non_blocking.
            TypeError: An argument is of another type.
        """
        return self._swap(self._swap_in, src_to_dst, non_blocking, pools, on_done, by_layer)

    @overload
    def swap_out(self, src_to_dst: torch.Tensor, non_blocking: Literal[False] = False) -> None: ...
    @overload
    def swap_out(
        self,
        src_to_dst: torch.Tensor,
        non_blocking: Literal[True],
        *,
        pools: Pools = ...,
        on_done: OnDone | None = ...,
        by_layer: bool = ...,
    ) -> Transfer: ...
    def swap_out(
        self,
        src_to_dst: torch.Tensor,
        non_blocking: bool = False,
        *,
        pools: Pools = (None, None),
        on_done: OnDone | None = None,
        by_layer: bool = False,
    ) -> Transfer | None:
        """Copy device blocks to host blocks in all layers.

        Args:
            src_to_dst: int64 [num_pairs, 2] on the CPU, (device block, host block).
            non_blocking: As in `swap_in`.
            pools: The device's and the host's BlockPool, or None each.
            on_done: As in `swap_in`.
            by_layer: As in `swap_in`.

        Returns:
            The Transfer, or None without non_blocking.

        Raises:
            ValueError: As in `swap_in`.
            TypeError: As in `swap_in`.
        """
        return self._swap(self._swap_out, src_to_dst, non_blocking, pools, on_done, by_layer)

    def copy(self, src_to_dsts: torch.Tensor) -> None:
        """Copy device blocks to device blocks in all layers.

        Args:
            src_to_dsts: int64 [num_pairs, 2] on the CPU, (from, to).

        Raises:
            ValueError: An id is out of range, or pairs depend on each other.
            TypeError: It is no tensor.
        """
        self._transfers.order_current()
        self._copy.run(src_to_dsts)

    def do_moves(self, moves: Iterable[BlockMove]) -> None:
        """Make moves that BlockManager.take_moves handed over, in their order.

        Args:
            moves: The moves.
        """
        for move in moves:
            self.do_move(move)

    def do_move(self, move: BlockMove) -> None:
        """Make one move, for BlockManager.do_moves.

        Args:
            move: The move.
        """
        do: dict[str, Callable[[torch.Tensor], object]] = {
            "swap_out": self.swap_out,
            "swap_in": self.swap_in,
            "copy": self.copy,
        }
        do[move.kind](torch.from_numpy(move.pairs))

    def layered_moves(self, moves: Sequence[BlockMove]) -> LayeredMoves:
        """Prepare moves to be made beside the computation, layer by layer, by `start_moves`.

        Args:
            moves: The moves, in their order.

        Returns:
            The moves, of which none is made yet.
        """
        return LayeredMoves(moves, len(self.gpu_cache), self._block_bytes, self._piece_copiers.get)

    def start_moves(self, moves: LayeredMoves, on_done: OnDone | None = None) -> Arrival:
        """Make moves beside the computation. They come after the work that the current stream has at the call.

        The host waits only on a CPU device. The owner of the blocks has no use of theirs before the arrival.

        Args:
            moves: Made by `layered_moves` of this engine.
            on_done: As in `swap_in`.

        Returns:
            The arrival, for which each layer waits. Every other swap or copy comes after it.

        Raises:
            Exception: A move has failed as it was started. The next start makes this move and the later ones.
        """
        self._transfers.poll()
        transfer = Transfer(moves.num_bytes, BlockPins((None, None), torch.zeros(0, 2, dtype=torch.int64)), on_done)
        self._transfers.start(transfer, moves.steps(), [last - first for first, last in moves.pieces])
        transfer._raise_error()
        return Arrival(transfer, self.layer_ids, moves.pieces)

    def poll(self) -> int:
        """Finish the transfers that are done, as every swap and copy does.

        Returns:
            How many transfers are in flight still.
        """
        return self._transfers.poll()

    def _swap(
        self,
        copier: Copier,
        src_to_dst: torch.Tensor,
        non_blocking: bool,
        pools: Pools,
        on_done: OnDone | None,
        by_layer: bool,
    ) -> Transfer | None:
        check_flag("non_blocking", non_blocking)
        check_flag("by_layer", by_layer)
        _check_pools(pools)
        if on_done is not None and not callable(on_done):
            raise TypeError(f"on_done must be callable, got {type(on_done).__name__}")
        if non_blocking:
            return self._start(copier, src_to_dst, pools, on_done, by_layer)
        if by_layer or on_done is not None or any(pool is not None for pool in pools):
            raise ValueError("pools, on_done and by_layer need non_blocking=True")
        self._transfers.order_current()
        copier.run(src_to_dst)
        return None

    def _start(
        self, copier: Copier, src_to_dst: torch.Tensor, pools: Pools, on_done: OnDone | None, by_layer: bool
    ) -> Transfer:
        self._transfers.poll()
        copier.check(src_to_dst)
        pairs = src_to_dst.clone(memory_format=torch.contiguous_format)  # the caller may change the original
        copiers = copier.split_layers() if by_layer else [copier]
        transfer = Transfer(len(pairs) * self._block_bytes, BlockPins(pools, pairs), on_done)
        layers_each = [1] * len(copiers) if by_layer else None
        return self._transfers.start(transfer, [partial(piece.run, pairs) for piece in copiers], layers_each)

    def _check_kv_scales(self) -> None:
        if self.kv_scales is None:
            return
        if len(self.kv_scales) != len(self.gpu_cache):
            raise ValueError(f"kv_scales must be one a layer, {len(self.gpu_cache)}, got {len(self.kv_scales)}")
        for scales, cache, layout in zip(self.kv_scales, self.gpu_cache, self.layouts, strict=True):
            check_scales(scales, cache, layout)

    def _allocate(self, layouts: tuple[CacheLayout, ...], calibration: Calibration | None) -> None:
        host, on_gpu = torch.device("cpu"), self.device.type == "cuda"
        if on_gpu and calibration is None and self.num_cpu_blocks and _C.cuda_error() is None:
            calibration = calibrate(self.device)
        max_bytes = (calibration.max_bytes_in, calibration.max_bytes_out) if calibration else (0, 0)
        self.layouts, self._block_bytes = layouts, sum(layout.block_bytes for layout in layouts)
        self.gpu_cache = allocate_layers(layouts, self.num_gpu_blocks, self.device)
        self.cpu_cache = allocate_layers(layouts, self.num_cpu_blocks, host, on_gpu)
        gpu, cpu = self.gpu_cache, self.cpu_cache

        def swap_in(layers: slice) -> Copier:
            return swap_copier(cpu[layers], gpu[layers], layouts[layers], max_bytes[0])

        def swap_out(layers: slice) -> Copier:
            return swap_copier(gpu[layers], cpu[layers], layouts[layers], max_bytes[1])

        def copy(layers: slice) -> Copier:
            return device_copier(gpu[layers], layouts[layers])

        all_layers = slice(None)
        self._swap_in, self._swap_out, self._copy = swap_in(all_layers), swap_out(all_layers), copy(all_layers)
        self._piece_copiers = PieceCopiers({"swap_in": swap_in, "swap_out": swap_out, "copy": copy})

    @staticmethod
    def get_cache_block_size(
        cache_config: CacheConfig, model_config: ModelConfig, parallel_config: ParallelConfig | None = None
    ) -> int:
        """Return the bytes of one block in all attention layers of one rank, K and V together. MLA has no value part.

        Args:
            cache_config: Layout and dtype.
            model_config: Layers, heads and sizes.
            parallel_config: The rank; by default the only one.

        Raises:
            TypeError: A config is of another type.
            ValueError: Configs do not fit together.
        """
        check_configs(cache_config, model_config, parallel_config)
        return cache_block_bytes(cache_config, model_config, parallel_config or ParallelConfig())


def _check_pools(pools: Pools) -> None:
    """Raise TypeError unless each is a BlockPool or None, and ValueError unless they are two."""
    if not isinstance(pools, (tuple, list)):
        raise TypeError(f"pools must be a pair of BlockPools or None, got {type(pools).__name__}")
    if len(pools) != 2:
        raise ValueError(f"pools must be a pair, of the sources and of the destinations, got {len(pools)}")
    for pool in pools:
        if pool is not None and not isinstance(pool, _C.BlockPool):
            raise TypeError(f"pools must be BlockPools or None, got {type(pool).__name__}")
