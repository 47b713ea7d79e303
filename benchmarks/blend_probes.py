"""Probes: tokens put before a segment, which is computed once more to measure how much its rows change with them.

A probe must know nothing of the document: of another document, of the segment itself, or of nothing at all.
"""

from collections.abc import Iterator

import torch

from kvpage.benchmarks import blend_task as task


def probes(segments: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Seeded. Names, and for each segment the tokens before it: int64 [num_documents, num_segments, num_tokens].

    segments: [num_documents, num_segments, segment_tokens], of several documents.
    """
    size, draw = segments.shape[2], torch.Generator().manual_seed(8)
    yield "itself", segments
    yield "half of itself", segments[..., size // 2 :]
    yield "itself reversed", segments.flip(2)
    yield "random tokens", torch.randint(task.VOCAB_SIZE, segments.shape, generator=draw)
    yield "a stranger", _of_another_document(segments, draw)
    yield "two strangers", torch.cat([_of_another_document(segments, draw) for _ in range(2)], dim=2)


def _of_another_document(segments: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return a segment of a document some documents further on."""
    count, places, _ = segments.shape
    further = torch.randint(1, count, (count, places), generator=draw)
    others = (torch.arange(count)[:, None] + further) % count
    return segments[others, torch.randint(places, (count, places), generator=draw)]
