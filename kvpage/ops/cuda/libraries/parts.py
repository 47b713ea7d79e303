"""Parts: the sequences of a step that one call of a library computes, and the tensors that say where they are.

    query   [ a | b | c c c c c | d d ]      a, b have one query each: they decode
              decodes     rest               libraries have a kernel of their own for these

Nothing waits for the device: what a library's plan needs of lengths is on the host already.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from kvpage.ops.args.sequences import Sequences


class Part(NamedTuple):
    """Some sequences of a step, next to each other.

    Attributes:
        seqs: Their places among the sequences.
        rows: The places of their queries.
        query_lens: Queries of each.
        seq_lens: Tokens of each in the cache.
        block_tables: int32 [num_seqs, max_blocks], on the device.
    """

    seqs: slice
    rows: slice
    query_lens: list[int]
    seq_lens: list[int]
    block_tables: torch.Tensor

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one query."""
        return all(count == 1 for count in self.query_lens)

    @property
    def device(self) -> torch.device:
        """The cache's device."""
        return self.block_tables.device


def parts_of(sequences: Sequences) -> list[Part] | None:
    """Return the decodes at the beginning and the rest; None where lengths are not known, or one is 0.

    Args:
        sequences: A step's.
    """
    lengths = sequences.host_lengths()
    if lengths is None:
        return None
    seq_lens, query_lens = lengths
    if not seq_lens or min(seq_lens) < 1 or min(query_lens) < 1 or sum(query_lens) != sequences.num_tokens:
        return None
    num_decodes = next((seq for seq, count in enumerate(query_lens) if count != 1), len(query_lens))
    bounds = sorted({0, num_decodes, len(query_lens)})
    firsts = [0, *accumulate(query_lens)]
    return [
        Part(
            slice(begin, end),
            slice(firsts[begin], firsts[end]),
            query_lens[begin:end],
            seq_lens[begin:end],
            sequences.block_tables[begin:end],
        )
        for begin, end in zip(bounds, bounds[1:], strict=False)
    ]


def indptr(lengths: Sequence[int]) -> torch.Tensor:
    """Return where each of several runs begins and the last one ends: int32 [len(lengths) + 1] on the host."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def on_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `values` of the host on `device`, through pinned memory, so that nothing waits."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def num_blocks_of(part: Part, block_size: int) -> list[int]:
    """Return the blocks of each sequence that hold its tokens."""
    return [-(-length // block_size) for length in part.seq_lens]


def used_block_ids(part: Part, block_size: int) -> torch.Tensor:
    """Return the block ids of all sequences, one after the other, without the blocks past their tokens.

    Args:
        part: The sequences.
        block_size: Tokens of a block.

    Returns:
        int32 [blocks], on the device.
    """
    counts = num_blocks_of(part, block_size)
    total, tables = sum(counts), part.block_tables
    firsts = on_device(torch.tensor([counts, [0, *accumulate(counts)][:-1]]), tables.device)
    seqs = torch.repeat_interleave(
        torch.arange(len(counts), device=tables.device), firsts[0], output_size=total
    )  # the size is known: nothing waits for it
    columns = torch.arange(total, device=tables.device) - firsts[1][seqs]
    return tables[seqs, columns]
