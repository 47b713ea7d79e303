"""LoadOrCompute: decides whether a cached block is worth its way back from the host.

    loading   latency + num_blocks * block_bytes / bandwidth
    computing           num_tokens               / prefill speed      those that loading saves

One rule decides wherever blocks come from the host: for a new sequence, and for one that comes back from a swap.
Both speeds are measured while serving, as moving averages. Until both are known, everything is loaded.
"""

import numbers
from dataclasses import dataclass

SMOOTHING = 0.2  # the weight of the newest measurement
MOST_BLOCKS = 1 << 31  # no prompt has more


@dataclass(slots=True)
class LoadOrCompute:
    """A rule for BlockManager, with which a slow tier never makes a request slower.

    Attributes:
        block_bytes: Bytes of a block in all layers.
        block_size: Tokens of a block.
        bytes_per_second: Measured by `saw_transfer`, or given.
        tokens_per_second: Measured by `saw_prefill`, or given.
        latency: Seconds that the smallest transfer takes.

    Raises:
        ValueError: A number is out of range.
        TypeError: A speed or the latency is no number.
    """

    block_bytes: int
    block_size: int
    bytes_per_second: float | None = None
    tokens_per_second: float | None = None
    latency: float = 0.0

    def __post_init__(self) -> None:
        for name in ("block_bytes", "block_size"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, got {getattr(self, name)!r}")
        for name in ("bytes_per_second", "tokens_per_second", "latency"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real) and (value is not None or name == "latency"):
                raise TypeError(f"{name} must be a number, got {type(value).__name__}")
        for name in ("bytes_per_second", "tokens_per_second"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}")
        if not self.latency >= 0:
            raise ValueError(f"latency must not be negative, got {self.latency!r}")

    def should_load(self, num_blocks: int, num_tokens: int | None = None) -> bool:
        """Return whether loading `num_blocks` blocks is expected to be faster than computing what they save.

        Args:
            num_blocks: Blocks to load, in one transfer.
            num_tokens: Tokens that need not be computed then; None for those of the blocks. A checkpoint after few
                blocks saves more, a last block that is not whole saves less.
        """
        if num_tokens is None or num_tokens == num_blocks * self.block_size:
            fewest = self.fewest_to_load
            return fewest is not None and num_blocks >= fewest
        seconds = self.load_seconds(num_blocks)
        if seconds is None or self.tokens_per_second is None:
            return True
        return seconds < num_tokens / self.tokens_per_second

    def load_seconds(self, num_blocks: int) -> float | None:
        """Return how long loading `num_blocks` blocks in one transfer is expected to take; None while it is unknown."""
        if self.bytes_per_second is None:
            return None
        return self.latency + num_blocks * self.block_bytes / self.bytes_per_second

    @property
    def fewest_to_load(self) -> int | None:
        """The smallest number of blocks whose loading is expected to be faster; None where no number is."""
        if self.bytes_per_second is None or self.tokens_per_second is None:
            return 0
        saved = self.block_size / self.tokens_per_second - self.block_bytes / self.bytes_per_second  # by each block
        return int(self.latency / saved) + 1 if self.latency < saved * MOST_BLOCKS else None

    def should_store(self) -> bool:
        """Return whether a block on the host could ever be worth loading, where many share the latency."""
        if self.bytes_per_second is None or self.tokens_per_second is None:
            return True
        return self.block_bytes / self.bytes_per_second < self.block_size / self.tokens_per_second

    def saw_transfer(self, num_bytes: int, seconds: float) -> None:
        """Update the bandwidth by a transfer. Zero bytes or seconds change nothing.

        Args:
            num_bytes: Bytes of the transfer.
            seconds: Its duration.
        """
        self.bytes_per_second = _smoothed(self.bytes_per_second, num_bytes, seconds)

    def saw_prefill(self, num_tokens: int, seconds: float) -> None:
        """Update the prefill speed by a prefill. Zero tokens or seconds change nothing.

        Args:
            num_tokens: Tokens that were computed.
            seconds: The duration.
        """
        self.tokens_per_second = _smoothed(self.tokens_per_second, num_tokens, seconds)


def _smoothed(before: float | None, amount: int, seconds: float) -> float | None:
    if amount <= 0 or seconds <= 0:
        return before
    speed = amount / seconds
    return speed if before is None else before + SMOOTHING * (speed - before)
