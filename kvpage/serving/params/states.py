"""StateConfig: how many states an engine keeps of a model whose layers have some, and at which positions."""

from dataclasses import dataclass

from kvpage.checks.values import check_at_least

CHECKPOINT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class StateConfig:
    """The settings of recurrent states. Models without any do not read them.

    A checkpoint is the state after an exact prefix, with the K and V after its last whole block. Running requests have
    states of their own besides: `max_num_seqs` of them.

    Attributes:
        checkpoint_bytes: Memory of the device for checkpoints, at most: 0, or that of one checkpoint or more. There is
            no more than one for each block. With 0 no state is kept on the way through a prompt: the host gets ends of
            answers alone. With 0 on both tiers no prefix is found. `KVPageCachePool` has the states of its rows in this
            memory, too. None means a share of the cache's memory where an engine chooses `num_gpu_blocks`, else 1 GiB.
        host_checkpoint_bytes: Memory of the host for checkpoints that the device has evicted, and for requests that
            are preempted.
        checkpoint_every: A checkpoint is also taken at each multiple of this number of tokens of a prompt; None for the
            ends of prompts and answers, where prompts diverge, and `cache_at`.

    Raises:
        ValueError: A value is no integer, or out of its range.
    """

    checkpoint_bytes: int | None = None
    host_checkpoint_bytes: int = 0
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        if self.checkpoint_bytes is not None:
            check_at_least("checkpoint_bytes", self.checkpoint_bytes, 0)
        check_at_least("host_checkpoint_bytes", self.host_checkpoint_bytes, 0)
        if self.checkpoint_every is not None:
            check_at_least("checkpoint_every", self.checkpoint_every, 1)

    @property
    def device_bytes(self) -> int:
        """The bytes of `checkpoint_bytes`, or 1 GiB."""
        return CHECKPOINT_BYTES if self.checkpoint_bytes is None else self.checkpoint_bytes
