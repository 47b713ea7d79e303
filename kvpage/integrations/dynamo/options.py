"""WorkerOptions: the options of a worker's command line that are kvpage's own. The others are Dynamo's."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvpage.checks.values import check_at_least
from kvpage.serving.live.config import check_seconds

Mode = Literal["agg", "prefill", "decode"]
NUMBERS = {
    "block_size": 1, "num_gpu_blocks": 1, "num_cpu_blocks": 0, "max_num_seqs": 1, "max_num_batched_tokens": 1,
    "max_num_waiting": 1, "pin_quota": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The settings of a worker. It checks itself.

    Attributes:
        model: The folder of the model and its tokenizer.
        served_model_name: The name by which clients ask for it. None means the folder's.
        dtype: Of the weights, as transformers names it. "auto" means as they were saved.
        device: Where the model computes, as torch names it.
        block_size: Tokens of a block. All workers of a model need the same, and the router learns it.
        num_gpu_blocks: Blocks of the device.
        num_cpu_blocks: Blocks of the host, for evicted and preempted ones.
        max_model_len: Tokens of a request at most. None means all that the model allows.
        max_num_seqs: Sequences that run at once.
        max_num_batched_tokens: Tokens of a step at most.
        max_num_waiting: Requests that wait at most. Others are refused with 503.
        pin_quota: Blocks that hints may pin.
        max_pin_seconds: Seconds for which a hint may pin a prompt at most.
        store: The URL of a store that workers share, such as redis://host:6379. None for none.
        chunk_size: Tokens of a chunk of the store. None means 64, or the multiple of block_size after it.
        layers_per_record: Layers of a record of the store. Prefill workers store these at once, while they compute
            the next ones. All workers need the same. None stores chunks whole.
        events: Where the events of the cache are published, as EventConfig.endpoint says. Dynamo's part of the worker
            reads them, and passes them on.
        disaggregation_mode: "agg" answers requests. "prefill" computes prompts and stores their K and V, and "decode"
            loads them and goes on; both need a store.
        drain_timeout: Seconds that running requests have after a signal to end. Requests that are left go to others.

    Raises:
        ValueError: A value is out of its range, or a store is missing.
        TypeError: A value is of another type.
    """

    model: str
    served_model_name: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    block_size: int = 16
    num_gpu_blocks: int = 1024
    num_cpu_blocks: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_waiting: int = 1024
    pin_quota: int = 0
    max_pin_seconds: float = 3600.0
    store: str | None = None
    chunk_size: int | None = None
    layers_per_record: int | None = None
    events: str = "tcp://127.0.0.1:*"
    disaggregation_mode: Mode = "agg"
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        for name, least in NUMBERS.items():
            check_at_least(name, getattr(self, name), least)
        for name in ("max_model_len", "chunk_size", "layers_per_record"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        for name in ("max_pin_seconds", "drain_timeout"):
            check_seconds(name, getattr(self, name))
        if self.disaggregation_mode not in get_args(Mode):
            modes = ", ".join(get_args(Mode))
            raise ValueError(f"disaggregation_mode must be one of {modes}, got {self.disaggregation_mode!r}")
        if self.disaggregation_mode != "agg" and self.store is None:
            raise ValueError(
                f"store must be given with disaggregation_mode={self.disaggregation_mode!r}: prefill workers leave K "
                "and V there for decode workers"
            )

    @property
    def name(self) -> str:
        """The name by which clients ask for the model."""
        return self.served_model_name or self.model.rstrip("/").rpartition("/")[2]

    @property
    def tokens_of_chunk(self) -> int:
        """Tokens of a chunk of the store: a multiple of the block's."""
        return self.chunk_size or -(-64 // self.block_size) * self.block_size


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add kvpage's options to a command line.

    Args:
        parser: Has none of them yet.
    """
    group = parser.add_argument_group("kvpage")
    add, default = group.add_argument, WorkerOptions("")
    add("--model", required=True, metavar="DIR", help="folder of the model and its tokenizer")
    add("--served-model-name", metavar="NAME", help="name by which clients ask for it (default: the folder's)")
    add("--dtype", default=default.dtype, help="of the weights (default: as saved)")
    add("--device", default=default.device, help="where the model computes (default: %(default)s)")
    add("--max-model-len", type=int, help="tokens of a request at most (default: all that the model allows)")
    add("--store", metavar="URL", help="a store that workers share, such as redis://host:6379")
    add("--chunk-size", type=int, help="tokens of a chunk of the store (default: 64)")
    add("--layers-per-record", type=int, metavar="N", help="layers stored at once (default: chunks are stored whole)")
    add("--max-pin-seconds", type=float, default=default.max_pin_seconds, help="of a hint (default: %(default)s)")
    add("--events", default=default.events, metavar="ENDPOINT", help="where events are published (%(default)s)")
    add("--drain-timeout", type=float, default=default.drain_timeout, help="seconds (default: %(default)s)")
    add("--disaggregation-mode", choices=get_args(Mode), default=default.disaggregation_mode, help="role of the worker")
    for name in NUMBERS:
        add(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name), help="(default: %(default)s)")


def read_options(arguments: argparse.Namespace) -> WorkerOptions:
    """Return kvpage's part of a parsed command line.

    Args:
        arguments: Of a parser with `add_options`.

    Raises:
        ValueError: As WorkerOptions.
    """
    return WorkerOptions(**{name: getattr(arguments, name) for name in WorkerOptions.__dataclass_fields__})


def parse(argv: Sequence[str] | None) -> tuple[WorkerOptions, Any]:
    """Read a whole command line: kvpage's options, and Dynamo's own.

    Args:
        argv: Its words. None means those of this process.

    Returns:
        The options, and Dynamo's WorkerConfig.

    Raises:
        ValueError: As WorkerOptions.
    """
    from dynamo.common.backend.worker import WorkerConfig
    from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
    from dynamo.common.constants import DisaggregationMode
    from dynamo.common.utils.runtime import parse_endpoint

    parser = argparse.ArgumentParser("python -m kvpage.integrations.dynamo", description=__doc__, allow_abbrev=False)
    DynamoRuntimeArgGroup().add_arguments(parser)
    add_options(parser)
    arguments = parser.parse_args(argv)
    options = read_options(arguments)
    for name in WorkerOptions.__dataclass_fields__:
        delattr(arguments, name)
    runtime = DynamoRuntimeConfig.from_cli_args(arguments)
    runtime.validate()
    mode = options.disaggregation_mode
    standard = f"dyn://{runtime.namespace}.{'prefill' if mode == 'prefill' else 'backend'}.generate"
    names = zip(("namespace", "component", "endpoint"), parse_endpoint(runtime.endpoint or standard), strict=True)
    config = WorkerConfig.from_runtime_config(
        runtime, options.model, options.name, disaggregation_mode=DisaggregationMode(mode), **dict(names)
    )
    return options, config
