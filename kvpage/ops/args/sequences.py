"""Sequences: the blocks and lengths that one call of attention is about, checked once for all layers of a step."""

from typing import Any

import torch

from kvpage.checks.tensors import readable
from kvpage.checks.values import as_integer
from kvpage.layout.shared_prefixes import PlanRow
from kvpage.ops.args.bound_cache import BoundCache
from kvpage.ops.args.tokens import Lengths, check_tensor, host_lengths, length_bound, native_tables


class Sequences:
    """Sequences in the blocks of caches on one device, all with the same number of blocks of the same size.

    It keeps its tensors alive. Their contents are read at each call; lengths on the host are read when it is made.

    Args:
        cache: A layer's cache; the others must have as many blocks of the same size.
        num_tokens: Rows of the query, of all sequences.
        block_tables: int32 [num_seqs, max_blocks] on the cache's device.
        seq_lens: [num_seqs] tokens of each sequence in the cache, its queries included: on the host, or int32
            or int64 on the cache's CUDA device.
        query_lens: [num_seqs] queries of each sequence, likewise. Default: one each.
        max_query_len: A bound of query_lens. Default: the largest, or num_tokens where the host does not know it.
        max_seq_len: A bound of seq_lens. Default: the largest, or as many as fit into a table.
        shared: The plan of `kvpage.ops.shared_prefixes` on the cache's device, int64 [9, num_planned]. It is for all
            sequences or, with query_lens, for first ones that have one query each. Its values are not checked. Default:
            each sequence reads its keys alone. On a CPU it makes no difference: sequences whose tables begin alike are
            read together there.

    Attention on a CUDA device is cut by num_tokens, the tables' shape and the two bounds, not by the lengths. A graph
    that is captured with lengths on the device may be replayed with any others up to the bounds, 0 among them.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A shape, a dtype, a device, a length or a bound is wrong. Block ids are checked at each call.
    """

    __slots__ = (
        "_host_lengths",
        "_uploaded",
        "block_tables",
        "has_fixed_order",
        "launches",
        "max_query_len",
        "max_seq_len",
        "native_tables",
        "num_decodes",
        "num_tokens",
        "plans",
        "query_lens",
        "seq_lens",
        "shape",
        "shared",
    )

    def __init__(
        self,
        cache: BoundCache,
        num_tokens: int,
        block_tables: torch.Tensor,
        seq_lens: Lengths,
        query_lens: Lengths | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        shared: torch.Tensor | None = None,
    ) -> None:
        num_tokens = as_integer("num_tokens", num_tokens)
        self.block_tables = readable("block_tables", block_tables)
        self.native_tables = native_tables(cache.tensor, self.block_tables, cache.layout)
        self.num_tokens, self.shape = num_tokens, (cache.device, *cache.shape[:2])
        num_seqs, capacity = len(block_tables), block_tables.shape[1] * cache.layout.block_size
        self.seq_lens: list[int] | torch.Tensor
        self.query_lens: list[int] | torch.Tensor | None
        if cache.is_cuda:
            self.seq_lens = _known("seq_lens", seq_lens, num_seqs, capacity, cache.device)
            self.query_lens = (
                None if query_lens is None else _known("query_lens", query_lens, num_seqs, num_tokens, cache.device)
            )
            _check_counts([1] * num_seqs if query_lens is None else self.query_lens, self.seq_lens, num_tokens)
        else:  # the native call compares the two
            self.seq_lens = host_lengths("seq_lens", seq_lens, num_seqs, capacity)
            self.query_lens = [1] * num_seqs
            if query_lens is not None or not num_tokens:
                lengths = self.query_lens if query_lens is None else query_lens
                self.query_lens = host_lengths("query_lens", lengths, num_seqs, num_tokens)
        counts = [1] if self.query_lens is None else self.query_lens
        self.max_query_len = length_bound("max_query_len", max_query_len, _listed(counts), num_tokens)
        self.max_seq_len = length_bound("max_seq_len", max_seq_len, _listed(self.seq_lens), capacity)
        self.num_decodes = num_decodes(_listed(self.query_lens))
        self.shared = None if shared is None else _checked_plan(shared, cache.device)
        if shared is not None:
            self.num_decodes = _planned(shared.shape[1], num_seqs, self.query_lens)
        self._uploaded: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._host_lengths: tuple[list[int], list[int]] | None = None
        self.plans: dict[Any, Any] = {}
        self.launches: dict[Any, Any] = {}  # of layers so far, by the form of their rows
        self.has_fixed_order = False

    @classmethod
    def of_step(
        cls,
        cache: BoundCache,
        num_tokens: int,
        block_tables: torch.Tensor,
        seq_lens: list[int] | torch.Tensor,
        query_lens: list[int] | torch.Tensor | None,
        max_query_len: int,
        max_seq_len: int,
        num_decodes: int = 0,
        host_lengths: tuple[list[int], list[int]] | None = None,
        shared: torch.Tensor | None = None,
    ) -> "Sequences":
        """Return the sequences of a loop that has made these arguments itself. It checks none of them.

        The native call compares all that it reads: block ids, lengths, their sums.

        Args:
            cache: A layer's cache.
            num_tokens: Rows of the query, the sum of query_lens.
            block_tables: int32 [num_seqs, max_blocks], contiguous, on the cache's device.
            seq_lens: [num_seqs] in a list for a cache on the host, int32 or int64 on the cache's CUDA device else.
            query_lens: Likewise. None: one each, on a CUDA device.
            max_query_len: The largest of them.
            max_seq_len: Likewise.
            num_decodes: Sequences at the beginning that have one query each. Fewer may be named.
            host_lengths: seq_lens and query_lens as the host knows them, where the others are on the device.
            shared: As of the class.
        """
        self = cls.__new__(cls)
        num_blocks, block_size, *_ = cache.shape
        num_seqs, width = block_tables.shape
        self.block_tables, self.num_tokens = block_tables, num_tokens
        self.native_tables = block_tables.data_ptr(), block_tables.stride(0), num_seqs, width, num_blocks, block_size
        self.shape = cache.device, num_blocks, block_size
        self.seq_lens, self.query_lens = seq_lens, query_lens
        self.max_query_len, self.max_seq_len, self._uploaded = max_query_len, max_seq_len, None
        self.num_decodes, self.shared = num_decodes, shared
        self._host_lengths, self.plans, self.launches = host_lengths, {}, {}
        self.has_fixed_order = False
        return self

    def fix_order(self) -> None:
        """Have the sums of a row on a CUDA device taken in an order that its position alone decides, from now on.

        On a CPU they are so always. A plan of shared prefixes then makes no difference.
        """
        self.has_fixed_order = True

    def host_lengths(self) -> tuple[list[int], list[int]] | None:
        """Return seq_lens and query_lens as the host knows them; None where it does not."""
        if not isinstance(self.seq_lens, list):
            return self._host_lengths
        if self.query_lens is None:
            return self.seq_lens, [1] * len(self.seq_lens)
        return (self.seq_lens, self.query_lens) if isinstance(self.query_lens, list) else None

    def forget_host_lengths(self) -> None:
        """Let nothing be planned by lengths of the host from now on: lengths of the device will differ."""
        self._host_lengths = None

    def check(self, cache: BoundCache, num_tokens: int) -> None:
        """Check that these sequences are for such a cache and query, and that the tables keep their memory.

        Args:
            cache: The layer's cache.
            num_tokens: Rows of the query.

        Raises:
            ValueError: The number of rows, the device or the blocks are others, or the tables have moved.
        """
        if num_tokens != self.num_tokens:
            raise ValueError(f"query must have {self.num_tokens} rows, those of its sequences, got {num_tokens}")
        if self.shape != (cache.device, *cache.shape[:2]):
            raise ValueError(
                f"cache must be on the device, and have the blocks, that sequences were made for, "
                f"{self.shape}, got {(cache.device, *cache.shape[:2])}"
            )
        if self.block_tables.data_ptr() != self.native_tables[0]:
            raise ValueError("block_tables must keep the memory that sequences were made with")

    def lengths_on_device(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return seq_lens and query_lens on the device. Those of the host are copied once, without a wait.

        Raises:
            ValueError: Lengths are on the host while a CUDA graph is captured.
        """
        if self._uploaded is None:
            rows = [row for row in (self.seq_lens, self.query_lens) if isinstance(row, list)]
            if rows and torch.cuda.is_current_stream_capturing():
                raise ValueError("seq_lens and query_lens must be on the device while a graph captures paged_attention")
            copies = iter(_upload(rows, self.block_tables.device) if rows else ())
            seq_lens = next(copies) if isinstance(self.seq_lens, list) else self.seq_lens
            query_lens = next(copies) if isinstance(self.query_lens, list) else self.query_lens
            self._uploaded = seq_lens, query_lens
        return self._uploaded


def num_decodes(query_lens: list[int] | None) -> int:
    """Return the sequences at the beginning that have one query each; 0 where the host does not know.

    Args:
        query_lens: The queries of each sequence, or None.
    """
    if query_lens is None:
        return 0
    return next((seq for seq, count in enumerate(query_lens) if count != 1), len(query_lens))


def _checked_plan(shared: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a plan, checked for all but its values and its number of sequences."""
    plan = readable("shared", shared)
    if plan.dim() != 2 or (plan.shape[1] > 1 and plan.stride(1) != 1):
        raise ValueError(f"shared must have rows, each contiguous, got {tuple(plan.shape)}, strides {plan.stride()}")
    check_tensor("shared", plan, torch.int64, (len(PlanRow), plan.shape[1]), device)
    return plan


def _planned(num_planned: int, num_seqs: int, query_lens: list[int] | torch.Tensor | None) -> int:
    """Return the sequences that a plan is for, which have one query each as far as the host knows."""
    fits = num_planned == num_seqs if query_lens is None else num_planned <= num_seqs
    if not fits or (isinstance(query_lens, list) and num_planned > num_decodes(query_lens)):
        raise ValueError(f"shared must be of sequences with one query each, the first ones, got {num_planned}")
    return num_planned


def _listed(lengths: list[int] | torch.Tensor | None) -> list[int] | None:
    return lengths if isinstance(lengths, list) else None


def _upload(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    """Lists of one length on the device, in one copy from pinned memory."""
    return torch.tensor(rows, dtype=torch.int32).pin_memory().to(device, non_blocking=True)


def _known(name: str, lengths: Lengths, num_seqs: int, most: int, device: torch.device) -> list[int] | torch.Tensor:
    """Lengths of the host as a list, checked; a tensor on the device as it is, checked for all but its values."""
    if not isinstance(lengths, torch.Tensor) or lengths.device != device:
        return host_lengths(name, lengths, num_seqs, most)
    if lengths.dtype not in (torch.int32, torch.int64) or lengths.dim() != 1 or not lengths.is_contiguous():
        raise ValueError(f"{name} must be one row of int32 or int64, got {lengths.dtype} {tuple(lengths.shape)}")
    if len(lengths) != num_seqs:
        raise ValueError(f"{name} must have one entry for each of {num_seqs} block tables, got {len(lengths)}")
    return lengths


def _check_counts(counts: list[int] | torch.Tensor | None, lengths: list[int] | torch.Tensor, num_tokens: int) -> None:
    """Compare queries with rows and with keys, as far as the host knows them."""
    if not isinstance(counts, list):
        return
    if sum(counts) != num_tokens:
        raise ValueError(f"query_lens must sum up to the {num_tokens} rows of query, got {sum(counts)}")
    if isinstance(lengths, list):
        for seq, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            if count > length:
                raise ValueError(f"query_lens[{seq}] must be in [0, seq_lens = {length}], got {count}")
