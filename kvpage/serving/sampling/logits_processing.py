"""Apply the rules of several sequences to their logits at once, in the order in which transformers applies them.

    sequence_bias ─► logit_bias, penalties ─► n-grams, bad words, forced tokens, the end ─► suppress_tokens ─► choice
       library           arrays                             library                             arrays

Rules as arrays apply to all rows in one call. transformers' own processors run row by row, for the rows that need them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpage.serving.sampling.library_processors import LibraryProcessors
from kvpage.serving.sampling.sampled_row import SampledRow

TokenArrays = Sequence[npt.NDArray[np.int32]]


def process_logits(scores: torch.Tensor, rows: Sequence[SampledRow], token_ids: TokenArrays) -> None:
    """Change scores in place: fp32 [len(rows), vocab_size]. token_ids: each row's prompt and generated tokens."""
    if not any(row.changes_logits for row in rows):
        return
    library = _with_library(rows)
    _run(scores, library, token_ids, lambda processors: processors.before)
    _add_biases(scores, rows)
    _penalize(scores, rows, token_ids)
    _rule_out(scores, [row.barred_ids(len(tokens)) for row, tokens in zip(rows, token_ids, strict=True)])
    _run(scores, library, token_ids, lambda processors: processors.after)
    _rule_out(scores, [row.unwanted_ids(len(tokens)) for row, tokens in zip(rows, token_ids, strict=True)])
    for index, row in enumerate(rows):
        if row.mask is not None:
            scores[index].masked_fill_(~allowed_tokens(row.mask, scores.shape[1]).to(scores.device), -torch.inf)


def allowed_tokens(mask: npt.NDArray[np.uint32], vocab_size: int) -> torch.Tensor:
    """Return whether each token may come, bool [vocab_size]: token i if bit i % 32 of mask[i // 32] is set."""
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")[:vocab_size]
    return torch.from_numpy(np.pad(bits, (0, vocab_size - len(bits)))).bool()


def warp_by_library(scores: torch.Tensor, rows: Sequence[SampledRow], token_ids: TokenArrays) -> None:
    """Run transformers' warpers on the rows that need one, in place: top_k, top_p and min_p among them."""
    _run(scores, _with_library(rows), token_ids, lambda processors: processors.drawing)


def watermark(scores: torch.Tensor, rows: Sequence[SampledRow], token_ids: TokenArrays) -> None:
    """Watermark the rows that ask for it, in place. It is the last rule."""
    _run(scores, _with_library(rows), token_ids, lambda processors: [processors.mark])


def _with_library(rows: Sequence[SampledRow]) -> list[tuple[int, LibraryProcessors]]:
    return [(index, row.library) for index, row in enumerate(rows) if row.library is not None]


def _run(
    scores: torch.Tensor,
    library: Sequence[tuple[int, LibraryProcessors]],
    token_ids: TokenArrays,
    stage: Callable[[LibraryProcessors], Sequence[Any]],
) -> None:
    for index, processors in library:
        if not (asked := stage(processors)):
            continue
        so_far = torch.from_numpy(token_ids[index].astype(np.int64)).unsqueeze(0).to(scores.device)
        row_scores = scores[index : index + 1].clone()
        for processor in asked:
            row_scores = processor(so_far, row_scores)
        scores[index : index + 1] = row_scores


def _add_biases(scores: torch.Tensor, rows: Sequence[SampledRow]) -> None:
    if not any(len(row.biased_ids) for row in rows):
        return
    places, is_inside = _places(scores, [row.biased_ids for row in rows])
    biases = torch.from_numpy(np.concatenate([row.biases for row in rows])[is_inside]).to(scores.device)
    scores.index_put_(places, biases, accumulate=True)


def _penalize(scores: torch.Tensor, rows: Sequence[SampledRow], token_ids: TokenArrays) -> None:
    """Apply the penalties for tokens of the sequence. Tokens of the prompt get the repetition_penalty alone."""
    asking = [index for index, row in enumerate(rows) if row.seen is not None]
    if not asking:
        return
    seen = [row.seen.of(token_ids[index]) for index in asking if (row := rows[index]).seen is not None]
    lengths = [len(ids) for ids, _ in seen]
    all_ids = [np.empty(0, np.int64)] * len(rows)
    for index, (ids, _) in zip(asking, seen, strict=True):
        all_ids[index] = ids
    places, is_inside = _places(scores, all_ids)
    penalties = np.repeat(np.array([rows[index].penalties for index in asking], np.float32), lengths, axis=0)[is_inside]
    counts = np.concatenate([counts for _, counts in seen])[is_inside].astype(np.float32)
    repetition = torch.from_numpy(np.ascontiguousarray(penalties[:, 0])).to(scores.device)
    taken_off = torch.from_numpy(penalties[:, 1] * (counts > 0) + penalties[:, 2] * counts).to(scores.device)
    old_scores = scores[places]
    scores[places] = torch.where(old_scores < 0, old_scores * repetition, old_scores / repetition) - taken_off


def _rule_out(scores: torch.Tensor, ids: Sequence[npt.NDArray[np.int64]]) -> None:
    if any(map(len, ids)):
        places, _ = _places(scores, ids)
        scores[places] = -torch.inf


def _places(
    scores: torch.Tensor, ids: Sequence[npt.NDArray[np.int64]]
) -> tuple[tuple[torch.Tensor, torch.Tensor], npt.NDArray[np.bool_]]:
    """Return the row and column of each id of each row, and which ids have a place: those of the vocabulary."""
    rows = np.repeat(np.arange(len(ids)), [len(row_ids) for row_ids in ids])
    columns = np.concatenate(ids)
    is_inside = (columns >= 0) & (columns < scores.shape[1])
    row_places, column_places = (torch.from_numpy(numbers[is_inside]).to(scores.device) for numbers in (rows, columns))
    return (row_places, column_places), is_inside
