"""EngineConfig: the settings of an engine.

EngineConfig(CacheConfig(block_size=16, num_gpu_blocks=256), max_num_seqs=8) ─► Engine.from_model(model, config)
"""

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from kvpage.blend.config import BlendConfig
from kvpage.blocks.config import BlockConfig, HostPolicy
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import as_list, check_at_least, check_flag
from kvpage.layout.config import CacheConfig
from kvpage.layout.kv_scales import KVScales
from kvpage.observe.events.config import EventConfig
from kvpage.serving.params.defaults import GenerationDefaults
from kvpage.serving.params.states import StateConfig
from kvpage.serving.sessions.config import SessionConfig
from kvpage.serving.weights.watch import ChangedWeights

FLAGS = (
    "load_or_compute", "native_layers", "enforce_eager", "compile_model", "save_portions", "same_bits",
    "explains_requests",
)  # fmt: skip
AttentionBackendName = Literal["auto", "kvpage", "flashinfer", "flash_attn", "flash_attn_3", "flash_mla"]
MAX_RANK_TIMEOUT = 86_400.0
"""Seconds: a day."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of an engine. It checks itself. `Engine.from_model` checks the rest with the model.

    Attributes:
        cache_config: The cache of both tiers. With `num_gpu_blocks` 0 `Engine.from_model` takes as many as fit: on a
            GPU `gpu_memory_utilization` of the memory that weights, steps and captured steps leave free, by a trial
            that compiles what they need; on a CPU 4 GiB or half of the free memory. Blocks of windows and checkpoints
            of states are in this memory, too, unless their numbers are given. The host tier, of `num_cpu_blocks`, takes
            evicted and preempted blocks.
            With the backend "mla" blocks keep the latents of models that have them (DeepSeek's and others with MLA), in
            a fraction of the bytes. With any other they keep the K and V of heads.
        max_num_seqs: Sequences that run at once.
        max_num_batched_tokens: Tokens that one step computes at most. Longer prompts are computed in portions.
        max_model_len: Tokens of a request at most, generated ones included. None means all that the model allows.
        enable_prefix_caching: Requests find the blocks of others. See BlockManager.
        share_parts: As of BlockConfig. So are host_policy, pin_quota and eviction.
        load_or_compute: Leave blocks on the host that are faster to compute than to load, by the measured speeds.
        kv_scales: For a cache of 8-bit floats: one of each layer, or "calibrate" to compute them from the model's K
            and V of `calibration_tokens`. None means 1. They are fixed before the first request.
        calibration_tokens: Token ids of one sequence, for "calibrate". None means a few of the model's vocabulary.
        events: Publish the contents of the cache, for routers. It needs the extra `events`, and `close` of the engine.
        residency_sample_rate: The part of the cached blocks, 0 to 1, whose lifetimes `stats` reports.
        store_deadline: Seconds that a request waits for a store at most, while others compute.
        save_portions: Store the chunks of a prompt as its portions are computed, not only once it is done. For prefill
            workers, whose chunks others load meanwhile (ArrivingStore).
        save_generated: Store generated tokens, too. None means as the store's `save_decode_cache` says.
        blend: Requests that ask for it reuse the segments of their prompts at any position (CacheBlend). None means
            that no request may ask.
        generation_config: Parameters of requests that are None are taken from the model's generation config. "model"
            refuses a config that asks for features that are not served. "served" leaves these out. "ignore" takes the
            end-of-sequence tokens only.
        native_layers: Compute the model's RMS norms, gated MLPs and rotations with kvpage's operations, on a CPU its
            linear layers, too, over the model's weights. On a GPU the weights of layers with one input are put side by
            side; nothing else of the model changes. Layers of other kinds compute as ever. False means that all do.
        enforce_eager: On a GPU, compute every step by the model's Python. False lets `Engine.warmup` capture decode
            steps as CUDA graphs. There are none on a CPU.
        cudagraph_capture_sizes: The numbers of sequences for which decode steps are captured, each at most
            `max_num_seqs`. None means 1, 2, 4, 8, 16, 24, 32, 48, 64 and so on, up to `max_num_seqs`.
        cudagraph_max_bytes: Device memory that all captured steps keep at most. The largest steps come first.
        async_scheduling: On a GPU, begin a decode step before the tokens of the one before have come to the host, where
            that changes no token. None means True.
        compile_model: Compute with `torch.compile` of the model, but for attention. It takes the place of native
            layers. The model does not change.
        attention_backend: On a GPU, what attends over the blocks: "kvpage", its own kernels; "flashinfer",
            "flash_attn", "flash_attn_3" or "flash_mla", a library that is installed and takes the cache and the model;
            "auto", the first of these that does, or "kvpage". Calls that are not a library's kind go to "kvpage".
        tensor_parallel_size: Processes that share the heads of a model that transformers has sharded over them
            (`from_pretrained(..., tp_plan="auto")`, started by torchrun). Rank 0 makes the engine, and each other one
            calls `Engine.follow`. It excludes `blend` and `compile_model`; decode steps are neither captured nor begun
            ahead.
        rank_timeout: Seconds after which a rank that is silent counts as lost. The end of a rank is noticed at once.
        states: The budget and the positions of kept states, for models with recurrent layers.
        num_window_blocks: Blocks of each group of layers with the same sliding window, apart from the blocks of the
            other layers. Sequences give back those behind the window. None means one table for all layers, whose blocks
            stay. With a host tier, each group has its share of blocks there. It excludes blending, other attention
            backends than kvpage's, and latents. "auto" lets `Engine.from_model` choose the number where it chooses
            `num_gpu_blocks`. It becomes None where `num_gpu_blocks` is given, with several ranks, and with an option
            that excludes windows of their own.
        same_bits: Compute tokens and log-probabilities that are functions of the model and the request alone, bit by
            bit: whatever is cached, runs beside it, or was preempted. A model or a machine on which this cannot hold is
            refused, with the reason. It excludes `compile_model`, several ranks, and blending with a ratio below 1. On
            a GPU, where it is untried, it excludes more. See the page "The same bits".
        kv_cache_memory: Bytes of the device, of one rank, for what `Engine.from_model` chooses the numbers of: blocks,
            those of windows, checkpoints. None means as `cache_config` says. It excludes `num_gpu_blocks`.
        sessions: The limits of sessions.
        changed_weights: What a step does that finds the model's weights changed in place, without `update_weights` or
            `reset_prefix_cache`: "error" raises WeightsChanged; "version" begins a version of a new name, and computes
            the K and V of all requests again. The page "Weights" says what is noticed.
        explains_requests: Note of each request how far the cache reached into its prompt, and why not further; see
            RequestOutput. It costs each request one more look at the tree.

    Raises:
        TypeError: A value is of another type.
        ValueError: A value is out of its range, or two contradict each other.
    """

    cache_config: CacheConfig = field(default_factory=CacheConfig)
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    share_parts: bool = True
    host_policy: HostPolicy | None = None
    load_or_compute: bool = True
    pin_quota: int = 0
    eviction: str = "lru"
    kv_scales: Sequence[KVScales] | Literal["calibrate"] | None = None
    calibration_tokens: Tokens | None = None
    events: EventConfig | None = None
    residency_sample_rate: float = 0.0
    store_deadline: float = 5.0
    save_generated: bool | None = None
    save_portions: bool = False
    blend: BlendConfig | None = None
    generation_config: GenerationDefaults = "model"
    native_layers: bool = True
    enforce_eager: bool = False
    cudagraph_capture_sizes: Sequence[int] | None = None
    cudagraph_max_bytes: int = 2**30
    async_scheduling: bool | None = None
    compile_model: bool = False
    attention_backend: AttentionBackendName = "auto"
    tensor_parallel_size: int = 1
    rank_timeout: float = 60.0
    states: StateConfig = field(default_factory=StateConfig)
    num_window_blocks: int | Literal["auto"] | None = "auto"
    kv_cache_memory: int | None = None
    same_bits: bool = False
    sessions: SessionConfig = field(default_factory=SessionConfig)
    changed_weights: ChangedWeights = "error"
    explains_requests: bool = False

    def __post_init__(self) -> None:
        _check_type("cache_config", self.cache_config, CacheConfig)
        self.block_config()  # checks the options of blocks
        for name, kind in (("events", EventConfig), ("blend", BlendConfig)):
            if getattr(self, name) is not None:
                _check_type(name, getattr(self, name), kind)
        _check_type("states", self.states, StateConfig)
        self._check_flags()
        self._check_numbers()
        self._check_scales()
        self._check_graphs()
        self._check_ranks()
        if self.attention_backend not in get_args(AttentionBackendName):
            names = ", ".join(get_args(AttentionBackendName))
            raise ValueError(f"attention_backend must be one of {names}, got {self.attention_backend!r}")
        if self.changed_weights not in get_args(ChangedWeights):
            raise ValueError(f"changed_weights must be 'error' or 'version', got {self.changed_weights!r}")
        self._check_windows()
        self._check_bits()
        if self.blend is not None and not self.enable_prefix_caching:
            raise ValueError("blend needs enable_prefix_caching, which keeps K and V until they are kept as segments")
        if self.generation_config not in get_args(GenerationDefaults):
            raise ValueError(f"generation_config must be 'model', 'served' or 'ignore', got {self.generation_config!r}")

    def block_config(self) -> BlockConfig:
        """Return the options of the block manager."""
        names = "enable_prefix_caching", "share_parts", "host_policy", "pin_quota", "eviction"
        return BlockConfig.of_cache(self.cache_config, **{name: getattr(self, name) for name in names})

    def _check_flags(self) -> None:
        for name in FLAGS:
            check_flag(name, getattr(self, name))
        for name in ("save_generated", "async_scheduling"):
            if getattr(self, name) is not None:
                check_flag(name, getattr(self, name))

    def _check_ranks(self) -> None:
        if self.tensor_parallel_size == 1:
            return
        for name, refused, why in (
            ("blend", self.blend is not None, "None"),
            ("async_scheduling", self.async_scheduling is True, "None or False"),
            ("compile_model", self.compile_model, "False"),
        ):
            if refused:
                size = self.tensor_parallel_size
                raise ValueError(f"{name} must be {why} with several ranks, got it with tensor_parallel_size={size}")

    def _check_bits(self) -> None:
        """Raise ValueError for options with which no bits are promised."""
        if not self.same_bits:
            return
        for name, is_refused, rule in (
            ("compile_model", self.compile_model, "False"),
            ("tensor_parallel_size", self.tensor_parallel_size > 1, "1"),
            ("blend", self.blend is not None and self.blend.ratio < 1, "None, or of ratio 1,"),
        ):
            if is_refused:
                raise ValueError(f"{name} must be {rule} with same_bits, got {getattr(self, name)}")

    def _check_windows(self) -> None:
        """Check the number of windows' blocks, and make "auto" None where there can only be one table."""
        if self.num_window_blocks is None:
            return
        conflicts, num_blocks = self._window_conflicts(), self.cache_config.num_gpu_blocks
        if isinstance(self.num_window_blocks, str) and self.num_window_blocks == "auto":
            if conflicts or num_blocks or self.tensor_parallel_size > 1:
                object.__setattr__(self, "num_window_blocks", None)
            return
        check_at_least("num_window_blocks", self.num_window_blocks, 1)
        if not num_blocks:
            raise ValueError("num_gpu_blocks must be positive with num_window_blocks, got 0")
        if conflicts:
            raise ValueError(conflicts[0])

    def _window_conflicts(self) -> list[str]:
        """Return the reasons for which windows cannot have blocks of their own."""
        library = None if self.attention_backend in ("auto", "kvpage") else self.attention_backend
        reasons = [
            f"{name} must be {rule} with num_window_blocks, got {value}"
            for name, value, rule in (
                ("backend", self.cache_config.backend == "mla" and "'mla'", "another than 'mla'"),
                ("attention_backend", library, "'auto' or 'kvpage'"),
            )
            if value
        ]
        if self.blend is not None:
            reasons.append("blend must be None with num_window_blocks: windows give back the K and V of segments")
        return reasons

    def _check_graphs(self) -> None:
        """Check the sizes and the memory of captured steps, and keep the sizes as a tuple."""
        check_at_least("cudagraph_max_bytes", self.cudagraph_max_bytes, 0)
        if self.cudagraph_capture_sizes is None:
            return
        sizes = tuple(as_list("cudagraph_capture_sizes", self.cudagraph_capture_sizes))
        for size in sizes:
            if not _is_integer(size) or not 1 <= size <= self.max_num_seqs:
                raise ValueError(
                    f"cudagraph_capture_sizes must be integers in [1, max_num_seqs = {self.max_num_seqs}], got {size!r}"
                )
        if not sizes:
            raise ValueError("cudagraph_capture_sizes must not be empty: enforce_eager=True captures nothing")
        object.__setattr__(self, "cudagraph_capture_sizes", sizes)

    def _check_numbers(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if not _is_integer(getattr(self, name)) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, got {getattr(self, name)!r}")
        if self.max_model_len is not None and (not _is_integer(self.max_model_len) or self.max_model_len < 1):
            raise ValueError(f"max_model_len must be a positive integer or None, got {self.max_model_len!r}")
        if self.kv_cache_memory is not None:
            check_at_least("kv_cache_memory", self.kv_cache_memory, 1)
            if self.cache_config.num_gpu_blocks:
                raise ValueError(f"kv_cache_memory must be None with num_gpu_blocks, got {self.kv_cache_memory}")
        check_at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        for name in ("residency_sample_rate", "store_deadline", "rank_timeout"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), numbers.Real):
                raise TypeError(f"{name} must be a number, got {type(getattr(self, name)).__name__}")
        if not 0 <= self.residency_sample_rate <= 1:
            raise ValueError(f"residency_sample_rate must be in [0, 1], got {self.residency_sample_rate!r}")
        if not self.store_deadline >= 0:
            raise ValueError(f"store_deadline must not be negative, got {self.store_deadline!r}")
        if not 0 < self.rank_timeout <= MAX_RANK_TIMEOUT:
            raise ValueError(f"rank_timeout must be in (0, {MAX_RANK_TIMEOUT}], got {self.rank_timeout!r}")

    def _check_scales(self) -> None:
        """Check the scales and their tokens, and keep both as tuples, which nothing can change."""
        if self.calibration_tokens is not None:
            if not isinstance(self.kv_scales, str):
                raise ValueError("calibration_tokens must be None unless kv_scales is 'calibrate'")
            tokens = as_tokens(self.calibration_tokens, "calibration_tokens").tolist()
            object.__setattr__(self, "calibration_tokens", tuple(tokens))
        if self.kv_scales is None or self.kv_scales == "calibrate":
            return
        if isinstance(self.kv_scales, str):
            raise ValueError(f"kv_scales must be KVScales, one a layer, 'calibrate' or None, got {self.kv_scales!r}")
        scales = tuple(as_list("kv_scales", self.kv_scales))
        for scale in scales:
            _check_type("kv_scales", scale, KVScales)
        object.__setattr__(self, "kv_scales", scales)


def _check_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {_article(kind)} {kind.__name__}, got {type(value).__name__}")


def _article(kind: type) -> str:
    return "an" if kind.__name__[0] in "AEIO" else "a"


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
