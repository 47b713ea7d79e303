"""CacheEngine: owns the cache tensors of the device tier and the host tier, and moves blocks within and between them.

It knows block ids and nothing of tokens, sequences or who uses which block: that is the block manager's.
"""

import torch

from kvpage import ops
from kvpage.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, cache_block_bytes


class CacheEngine:
    """The caches of one rank.

    gpu_cache, cpu_cache: one tensor per attention layer of this pipeline stage, in the backend's generic shape, strided
        as its stride order and the layer layout say, zeroed. On a CPU device the "gpu_cache" is simply the device tier
        in host memory. Host memory is pinned when the device is a GPU.
    layer_ids: the layer in the whole model of each entry of these lists.
    layout: the CacheLayout of every tensor in them.

    The tensors live as long as the engine; a `swap_*` or `copy` on a GPU is ordered on the current stream.
    """

    def __init__(
        self,
        cache_config: CacheConfig,
        model_config: ModelConfig,
        parallel_config: ParallelConfig | None = None,
        device_config: DeviceConfig | None = None,
    ) -> None:
        parallel_config = parallel_config or ParallelConfig()
        self.device: torch.device = (device_config or DeviceConfig()).device
        self.num_gpu_blocks = cache_config.num_gpu_blocks // parallel_config.pipeline_parallel_size
        self.num_cpu_blocks = cache_config.num_cpu_blocks // parallel_config.pipeline_parallel_size
        self.layer_ids = model_config.attention_layers(parallel_config)
        self.gpu_cache: list[torch.Tensor] = []
        self.cpu_cache: list[torch.Tensor] = []
        if not self.layer_ids:
            return
        self.layout = cache_config.layout(model_config, parallel_config)
        pin = self.device.type == "cuda"
        self.gpu_cache = self.layout.allocate(self.num_gpu_blocks, len(self.layer_ids), self.device)
        self.cpu_cache = self.layout.allocate(self.num_cpu_blocks, len(self.layer_ids), torch.device("cpu"), pin)

    def swap_in(self, src_to_dst: torch.Tensor) -> None:
        """Copies host blocks to device blocks in all layers. src_to_dst: int64 CPU [num_pairs, 2], (host, device)."""
        self._swap(self.cpu_cache, self.gpu_cache, src_to_dst)

    def swap_out(self, src_to_dst: torch.Tensor) -> None:
        """Copies device blocks to host blocks in all layers. src_to_dst: int64 CPU [num_pairs, 2], (device, host)."""
        self._swap(self.gpu_cache, self.cpu_cache, src_to_dst)

    def copy(self, src_to_dsts: torch.Tensor) -> None:
        """Copies device blocks to device blocks in all layers. src_to_dsts: int64 CPU [num_pairs, 2], (from, to)."""
        if not self.gpu_cache:
            return
        custom = getattr(self.layout.backend_class, "copy_blocks", None)
        if custom is not None:
            custom(self.gpu_cache, src_to_dsts)
        else:
            ops.copy_blocks(self.gpu_cache, src_to_dsts, self.layout)

    def _swap(self, src: list[torch.Tensor], dst: list[torch.Tensor], mapping: torch.Tensor) -> None:
        if not src:
            return
        custom = getattr(self.layout.backend_class, "swap_blocks", None)
        if custom is None:
            ops.swap_blocks_layers(src, dst, mapping, self.layout)
            return
        for src_layer, dst_layer in zip(src, dst, strict=True):
            custom(src_layer, dst_layer, mapping)

    @staticmethod
    def get_cache_block_size(
        cache_config: CacheConfig, model_config: ModelConfig, parallel_config: ParallelConfig | None = None
    ) -> int:
        """Bytes of one block in all attention layers of one rank, K and V together (MLA has no value part)."""
        return cache_block_bytes(cache_config, model_config, parallel_config or ParallelConfig())
