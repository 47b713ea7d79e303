"""ServeOptions: the options of `kvpage serve`, with vLLM's names where it has them."""

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvpage.checks.values import check_at_least
from kvpage.layout.model_folder import check_model_folder
from kvpage.server.config import MAX_HINTED_PRIORITY, ApiKey
from kvpage.serving.weights.adapters.adapter import check_adapter_name
from kvpage.store.config import TierURL, parse_size
from kvpage.store.placement import FACTORIES

DTYPES = ("auto", "float32", "float16", "bfloat16")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
ANY_TENANT = "*"
WINDOW_WORDS: dict[str, Literal["auto"] | None] = {"auto": "auto", "none": None}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of one server process; see `kvpage serve --help`.

    Raises:
        ValueError: An option is out of its range, or names a file or folder that is not there.
    """

    model: Path
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    weights_folder: Path | None = None
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    chat_template: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_gpu_blocks: int | None = None
    num_cpu_blocks: int = 0
    num_window_blocks: str = "auto"
    kv_cache_memory: str | None = None
    gpu_memory_utilization: float = 0.9
    state_memory: str | None = None
    host_state_memory: str = "0"
    checkpoint_every: int = 512
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_waiting: int = 1024
    pin_quota: int = 0
    eviction: str = "lru"
    tenant_pin_quota: int | None = None
    max_retain_priority: int = MAX_HINTED_PRIORITY
    min_priority: int | None = None
    tensor_parallel_size: int = 1
    attention_backend: str = "auto"
    enforce_eager: bool = False
    same_bits: bool = False
    enable_prefix_caching: bool = True
    generation_config: str = "served"
    trust_remote_code: bool = False
    stores: tuple[str, ...] = ()
    store_chunk_size: int = 256
    events: str | None = None
    events_topic: str = ""
    events_replay: str | None = None
    max_body_bytes: str = "16MiB"
    max_n: int = 128
    max_prompts: int = 256
    max_prompt_tokens: int | None = None
    max_batch_tokens: int = 2**21
    max_scored_tokens: int = 2**20
    max_logprobs: int = 20
    max_open_requests: int = 2048
    max_open_bytes: str | None = None
    drain_timeout: float = 30.0
    access_log: bool = False
    strict_fields: bool = False
    open_metrics: bool = True

    def __post_init__(self) -> None:
        check_model_folder(self.model)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be in [0, 65535], got {self.port}")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.num_gpu_blocks is not None and self.kv_cache_memory is not None:
            raise ValueError("give --num-gpu-blocks or --kv-cache-memory, not both")
        if self.num_gpu_blocks is not None:
            check_at_least("--num-gpu-blocks", self.num_gpu_blocks, 1)
        if isinstance(self.window_blocks, int) and self.num_gpu_blocks is None:
            raise ValueError("--num-window-blocks needs --num-gpu-blocks, the blocks of the other layers")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        memories = self.kv_cache_memory, self.state_memory, self.host_state_memory
        for size in filter(None, (*memories, self.max_body_bytes, self.max_open_bytes)):
            parse_size(size)
        check_at_least("--checkpoint-every", self.checkpoint_every, 0)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            if (number := getattr(self, name)) is not None:
                check_at_least(f"--{name.replace('_', '-')}", number, 1)
        if not self.drain_timeout >= 0:
            raise ValueError(f"--drain-timeout must be at least 0 seconds, got {self.drain_timeout}")
        check_at_least("--tensor-parallel-size", self.tensor_parallel_size, 1)
        if self.stores and self.tensor_parallel_size > 1:
            raise ValueError("--store is for one process: --tensor-parallel-size must be 1 with it")
        for url in self.stores:
            FACTORIES.check(TierURL.parse(url))
        for name in ("events_topic", "events_replay"):
            if getattr(self, name) and self.events is None:
                raise ValueError(f"--{name.replace('_', '-')} needs --events")
        self.adapter_folders()
        if self.weights_folder is not None and not self.weights_folder.is_dir():
            raise ValueError(f"--weights-folder must be a folder, {self.weights_folder} is none")
        self._check_files()

    def adapter_folders(self) -> dict[str, Path]:
        """Return the folder of each adapter, by its name. ValueError for one that is no NAME=FOLDER, or named twice."""
        folders: dict[str, Path] = {}
        for text in self.adapters:
            name, _, folder = text.partition("=")
            if not name or not folder or name in folders:
                raise ValueError(f"--adapter must be NAME=FOLDER, with each name once, got {text!r}")
            check_adapter_name(name)
            folders[name] = Path(folder)
        return folders

    def operator_key(self) -> str:
        """Return the operators' key: the environment's KVPAGE_OPERATOR_KEY; "" for none."""
        return os.environ.get("KVPAGE_OPERATOR_KEY", "")

    def _check_files(self) -> None:
        for name, path in (("--chat-template", self.chat_template), ("--api-key-file", self.api_key_file)):
            if path is not None and not path.is_file():
                raise ValueError(f"{name} must be a file, {path} is none")

    @property
    def window_blocks(self) -> int | Literal["auto"] | None:
        """The blocks of each window, as EngineConfig names them."""
        if self.num_window_blocks in WINDOW_WORDS:
            return WINDOW_WORDS[self.num_window_blocks]
        if not self.num_window_blocks.isdecimal() or not int(self.num_window_blocks):
            raise ValueError(
                f"--num-window-blocks must be auto, none or a positive integer, got {self.num_window_blocks!r}"
            )
        return int(self.num_window_blocks)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model: the given ones, or its path as it was given."""
        return self.served_model_names or (str(self.model),)

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names in URLs that are answered; none at all are all names, for a server that others reach."""
        if not self.is_local and not self.allowed_hosts:
            return ()
        return tuple(dict.fromkeys((*LOOPBACK, self.host, socket.gethostname().lower(), *self.allowed_hosts)))

    def keys(self) -> list[ApiKey]:
        """Return the API keys: of the options, of the environment's KVPAGE_API_KEY, and of the file.

        A line of the file is a key, and after a space its tenant, or * for a gateway that names tenants itself.

        Raises:
            ValueError: A key is none, or is there twice.
        """
        secrets = [*self.api_keys, *filter(None, [os.environ.get("KVPAGE_API_KEY")])]
        lines = [] if self.api_key_file is None else self.api_key_file.read_text().splitlines()
        pairs = [line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#")]
        named = [ApiKey(pair[0], _tenant(pair[1].strip() if len(pair) > 1 else "")) for pair in pairs]
        return [*map(ApiKey, secrets), *named]


def _tenant(name: str) -> str | None:
    return None if name == ANY_TENANT else name
