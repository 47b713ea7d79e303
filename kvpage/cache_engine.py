"""CacheEngine: owns the cache tensors of the device tier and the host tier, and moves blocks within and between them.

It knows block ids and nothing of tokens, sequences or who uses which block: that is the block manager's.
"""

from collections.abc import Callable

import torch

from kvpage.block_copy import BlockCopier, check_block_mapping
from kvpage.block_moves import BlockMoves
from kvpage.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, cache_block_bytes
from kvpage.layout import CacheLayout

BlockMover = Callable[[torch.Tensor], None]  # takes a block_mapping


class CacheEngine:
    """The caches of one rank.

    gpu_cache, cpu_cache: one tensor per attention layer of this pipeline stage, in the backend's generic shape, strided
        as its stride order and the layer layout say, zeroed. On a CPU device the "gpu_cache" is simply the device tier
        in host memory. Host memory is pinned when the device is a GPU.
    layer_ids: the layer in the whole model of each entry of these lists.

    The tensors live as long as the engine. A `swap_*` or `copy` on a GPU is ordered on the current stream and not
    waited for. Each raises what `BlockCopier.run` raises, before anything is written, unless the backend brings its own
    `swap_blocks` or `copy_blocks`, which then check the ids themselves.
    """

    def __init__(
        self,
        cache_config: CacheConfig,
        model_config: ModelConfig,
        parallel_config: ParallelConfig | None = None,
        device_config: DeviceConfig | None = None,
    ) -> None:
        parallel_config = parallel_config or ParallelConfig()
        self.device = torch.device((device_config or DeviceConfig()).device)
        self.num_gpu_blocks = cache_config.num_gpu_blocks // parallel_config.pipeline_parallel_size
        self.num_cpu_blocks = cache_config.num_cpu_blocks // parallel_config.pipeline_parallel_size
        self.layer_ids = model_config.attention_layers(parallel_config)
        self._layout: CacheLayout | None = None
        self.gpu_cache: list[torch.Tensor] = []
        self.cpu_cache: list[torch.Tensor] = []
        self._swap_in: BlockMover = check_block_mapping
        self._swap_out: BlockMover = check_block_mapping
        self._copy: BlockMover = check_block_mapping
        if self.layer_ids:
            self._allocate(cache_config.layout(model_config, parallel_config))

    @property
    def layout(self) -> CacheLayout:
        """The layout of every tensor of both tiers. ValueError where this stage has no attention layer."""
        if self._layout is None:
            raise ValueError("layout needs a stage with attention layers, this one has none")
        return self._layout

    def swap_in(self, src_to_dst: torch.Tensor) -> None:
        """Copies host blocks to device blocks in all layers. src_to_dst: int64 CPU [num_pairs, 2], (host, device)."""
        self._swap_in(src_to_dst)

    def swap_out(self, src_to_dst: torch.Tensor) -> None:
        """Copies device blocks to host blocks in all layers. src_to_dst: int64 CPU [num_pairs, 2], (device, host)."""
        self._swap_out(src_to_dst)

    def copy(self, src_to_dsts: torch.Tensor) -> None:
        """Copies device blocks to device blocks in all layers. src_to_dsts: int64 CPU [num_pairs, 2], (from, to)."""
        self._copy(src_to_dsts)

    def move(self, moves: BlockMoves) -> None:
        """Does what a BlockManager asks for, in its order."""
        do = {"swap_out": self.swap_out, "swap_in": self.swap_in, "copy": self.copy}
        for kind, pairs in moves:
            do[kind](torch.from_numpy(pairs))

    def _allocate(self, layout: CacheLayout) -> None:
        num_layers, host = len(self.layer_ids), torch.device("cpu")
        self._layout = layout
        self.gpu_cache = layout.allocate(self.num_gpu_blocks, num_layers, self.device)
        self.cpu_cache = layout.allocate(self.num_cpu_blocks, num_layers, host, self.device.type == "cuda")
        self._swap_in = _swapper(self.cpu_cache, self.gpu_cache, layout)
        self._swap_out = _swapper(self.gpu_cache, self.cpu_cache, layout)
        self._copy = _copier(self.gpu_cache, layout)

    @staticmethod
    def get_cache_block_size(
        cache_config: CacheConfig, model_config: ModelConfig, parallel_config: ParallelConfig | None = None
    ) -> int:
        """Bytes of one block in all attention layers of one rank, K and V together (MLA has no value part)."""
        return cache_block_bytes(cache_config, model_config, parallel_config or ParallelConfig())


def _swapper(srcs: list[torch.Tensor], dsts: list[torch.Tensor], layout: CacheLayout) -> BlockMover:
    custom = getattr(layout.backend_class, "swap_blocks", None)
    if custom is None:
        return BlockCopier(srcs, dsts, layout).run

    def swap_each_layer(block_mapping: torch.Tensor) -> None:
        check_block_mapping(block_mapping)
        for src, dst in zip(srcs, dsts, strict=True):
            custom(src, dst, block_mapping)

    return swap_each_layer


def _copier(caches: list[torch.Tensor], layout: CacheLayout) -> BlockMover:
    custom = getattr(layout.backend_class, "copy_blocks", None)
    if custom is None:
        return BlockCopier(caches, caches, layout).run

    def copy_all_layers(block_mapping: torch.Tensor) -> None:
        check_block_mapping(block_mapping)
        custom(caches, block_mapping)

    return copy_all_layers
