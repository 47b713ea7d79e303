"""LayerShape: heads and sizes of the K and V of one layer."""

from dataclasses import dataclass

from kvpage.checks.values import check_at_least


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads and sizes of one layer's K and V.

    Args:
        num_kv_heads: KV heads over all ranks.
        head_size: Elements of a head of K.
        value_size: Elements of a head of V; None for as many as K's. K's own number becomes None.

    Raises:
        ValueError: A number is not positive.
    """

    num_kv_heads: int
    head_size: int
    value_size: int | None = None

    def __post_init__(self) -> None:
        check_at_least("num_kv_heads", self.num_kv_heads, 1)
        check_at_least("head_size", self.head_size, 1)
        if self.value_size is not None:
            check_at_least("value_size", self.value_size, 1)
        if self.value_size == self.head_size:
            object.__setattr__(self, "value_size", None)

    @property
    def largest(self) -> int:
        """The larger size of K and V."""
        return max(self.head_size, self.value_size or 0)

    def heads_of_rank(self, num_ranks: int) -> int:
        """Return the number of KV heads on one rank. With fewer heads than ranks, each rank holds a copy of one.

        Args:
            num_ranks: Ranks that share the heads.

        Raises:
            ValueError: Neither of the two numbers divides the other, so that heads would be lost.
        """
        heads = self.num_kv_heads
        if max(heads, num_ranks) % min(heads, num_ranks):
            raise ValueError(
                f"tensor_parallel_size must divide num_kv_heads={heads} or be a multiple of it, got {num_ranks}"
            )
        return max(1, heads // num_ranks)
