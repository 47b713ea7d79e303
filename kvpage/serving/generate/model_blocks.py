"""ModelBlocks: the blocks of one model, for the caches of `generate` that come and go."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from transformers import PreTrainedModel

from kvpage.blocks.config import BlockConfig
from kvpage.blocks.manager import BlockManager
from kvpage.cache.cache_engine import CacheEngine
from kvpage.checks.interrupts import uninterrupted
from kvpage.layout.config import CacheConfig, DeviceConfig
from kvpage.layout.kv_scales import KVScales
from kvpage.serving.generate.cached_rows import CachedRows, TokenRows
from kvpage.serving.generate.layer_blocks import LayerBlocks
from kvpage.serving.generate.states.pool_states import PoolStates
from kvpage.serving.generate.states.row_states import RowStates
from kvpage.serving.generate.working_rows import WorkingMemory, WorkingRows
from kvpage.serving.model.kv_shape import KVShape
from kvpage.serving.model.limits import constant_rope_len, rope_limit, vocab_size


class ModelBlocks:
    """The cache tensors and the block manager of one model. KVPageCachePool checks first that they fit the model.

    model: the caller's, or a view of it: see KVPageCachePool. engine: owns the tensors. manager: owns the blocks.
    dtype: that of the model's K and V.
    layers: by layer_idx. num_layers: up to the last one with K and V or a state.
    states: of a model whose layers keep some; None for another.
    runner: computes the forwards of `model`, a view of the caller's; None where the caller's own model computes.
    forgotten: releases of caches that were dropped without one. The garbage collector appends at any time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: KVShape,
        engine: CacheEngine,
        manager: BlockManager,
        max_working_bytes: int | None = None,
        states: RowStates | None = None,
        runner: object | None = None,
    ) -> None:
        self.states, self.runner = states, runner
        self.model, self.engine, self.manager, self.dtype = model, engine, manager, shape.dtype
        layers = zip(shape.layer_ids, engine.bound_caches, shape.layer_shapes, strict=True)
        self.layers = {layer_id: LayerBlocks(cache, shape.is_latent, sizes) for layer_id, cache, sizes in layers}
        self.num_layers = max(*self.layers, *(states.layer_ids if states else ()), -1) + 1
        self.working_memory = WorkingMemory(max_working_bytes)
        self.forgotten: deque[Callable[[], None]] = deque()
        self._max_len = constant_rope_len(model)
        self._seq_ids = count()

    @classmethod
    def make(
        cls,
        model: PreTrainedModel,
        shape: KVShape,
        cache_config: CacheConfig,
        kv_scales: Sequence[KVScales] | None,
        blocks: BlockConfig | None = None,
        max_working_bytes: int | None = None,
        states: PoolStates | None = None,
    ) -> "ModelBlocks":
        """Allocate tensors of this shape on the model's device. No check is made here.

        Args:
            model: A decoder of transformers.
            shape: Sizes of its K and V.
            cache_config: The layout, and the number of blocks in each tier.
            kv_scales: One KVScales a layer, for caches of 8-bit floats; None otherwise.
            blocks: The options of the manager, with the numbers of `cache_config`; None for its defaults.
            max_working_bytes: See `KVPageCachePool.from_model`.
            states: Of a model whose layers keep some, and their budget; None for another.

        Returns:
            The blocks, with nothing cached.
        """
        blocks = BlockConfig.of_cache(cache_config) if blocks is None else blocks
        if states is not None:
            parts = states.make(shape, cache_config, model.device, kv_scales, blocks)
            return cls(model, shape, parts.engine, parts.manager, max_working_bytes, parts.states)
        engine = CacheEngine(
            cache_config, shape.model_config(), device_config=DeviceConfig(model.device), kv_scales=kv_scales
        )
        return cls(model, shape, engine, BlockManager.of(blocks), max_working_bytes)

    @uninterrupted
    def make_rows(self) -> CachedRows:
        """Make rows over the blocks, with no tokens yet. Forgotten caches are released first.

        Do not call it within a forward.

        Returns:
            The rows. The caller releases them.
        """
        self.release_forgotten()
        return CachedRows(self.manager, self.engine, self._seq_ids, self._make_working(), self.states)

    def release_forgotten(self) -> None:
        """Release the caches that were dropped without a release."""
        while self.forgotten:
            self.forgotten.popleft()()

    def _make_working(self) -> WorkingRows | None:
        """Make working rows; None where blocks do not keep K and V bit by bit, or nobody reads the rows."""
        if self.runner is not None:  # it reads blocks in place
            return None
        if not all(layer.keeps(self.dtype) for layer in self.layers.values()):
            return None
        num_slots = self.engine.num_gpu_blocks * self.manager.block_size
        bytes_per_token = sum(cache.nbytes for cache in self.engine.gpu_cache) // num_slots
        return WorkingRows(self.layers, bytes_per_token, self.working_memory)

    def check_forward(self, tokens: TokenRows, num_tokens: int) -> None:
        """Raise ValueError unless the model may compute these tokens, at the end of rows of `num_tokens` tokens."""
        check_eval(self.model)
        self.check_tokens(tokens)
        self.check_length(num_tokens)

    def check_tokens(self, tokens: TokenRows) -> None:
        """Check that the model can look up these ids. Negative ones have been refused before.

        Args:
            tokens: Token ids, [num_rows, num_tokens].

        Raises:
            ValueError: An id is not below the model's vocabulary size.
        """
        size = vocab_size(self.model)
        if tokens.max() >= size:
            raise ValueError(f"input_ids must be ids in [0, {size}), got {int(tokens.max())}")

    def check_length(self, num_tokens: int) -> None:
        """Check that the first tokens' K of so long rows would be as in shorter rows.

        Args:
            num_tokens: Tokens of each row.

        Raises:
            ValueError: The rotary embedding of the model changes before that length.
        """
        if num_tokens > self._max_len:
            raise ValueError(
                f"rows must have at most {self._max_len} tokens, where the model's rotary embedding changes, "
                f"got {num_tokens}{rope_limit(self.model, num_tokens)}"
            )


def check_eval(model: PreTrainedModel) -> None:
    """Raise ValueError for a model in training mode."""
    if model.training:
        raise ValueError(f"model must be in eval mode, {type(model).__name__} is in training mode")
