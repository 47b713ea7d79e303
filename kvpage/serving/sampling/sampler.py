"""Sampler: chooses the next token of each sequence, from its logits and its SamplingParams.

    logits ─► on a CPU: one native call for all rows          sample_rows
           ─► on a CUDA device: two launches for all rows     DeviceRows
           ─► rows with rules of transformers' processors     sample_by_torch
           ─► where Triton is missing: all rows               sample_by_torch

All draw at a random number that depends only on the sequence's seed and its number of tokens: not on the batch, and
not on whether a step was computed twice. The first two choose the same token from the same bits of logits. Torch's way
chooses it, too, unless that number lies within rounding errors of the border between two tokens.

In torch's way, greedy rows without other rules take the argmax, all in one call. The others are
processed and drawn, as many at once as stay in the processor's cache. A draw inverts the distribution function:

    weights   |--a--|b|------c------|d|     the first token whose running sum exceeds u * total
                            ^ u             u: Philox of seed and position
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

import kvpage._C as _C
from kvpage import ops
from kvpage.layout.sampling_record import ROW_RULES
from kvpage.serving.sampling.device_rows import DeviceRows
from kvpage.serving.sampling.logits_check import LogitsNotFinite, rows_not_finite
from kvpage.serving.sampling.logits_processing import TokenArrays, process_logits, warp_by_library, watermark
from kvpage.serving.sampling.native_rows import GREEDY, can_sample, sample_rows
from kvpage.serving.sampling.philox import uniforms
from kvpage.serving.sampling.sampled_row import SampledRow
from kvpage.serving.sampling.sampled_sequence import SampledSequence
from kvpage.serving.sampling.warping import BLOCK, block_maxima, cut, in_blocks, scale, to_weights

PART_SIZE = 2**20
"""The number of logits that are processed at once."""

BELOW_ONE = 1 - 2.0**-53


def sample(logits: torch.Tensor, sequences: Sequence[SampledSequence]) -> list[int]:
    """Return one token a row. logits: [len(sequences), vocab_size].

    Raises LogitsNotFinite for rows that hold NaN or +inf, or no finite number, before or after their processing.
    """
    tokens = Sampler(sequences).sample(logits, [sequence.num_generated for sequence in sequences])
    chosen: list[int] = tokens.tolist()
    return chosen


class Sampler:
    """Sequences that are sampled together, with the records of `sample_rows`: for as long as they stay the same.

    A row that needs torch is taken as a greedy one first. is_greedy: whether all take the likeliest token, for which
    the positions do not count.
    """

    def __init__(self, sequences: Sequence[SampledSequence]) -> None:
        self._sequences = sequences
        sampled = [sequence.sampled_row for sequence in sequences]
        self.is_greedy = not any(sampled)
        self._by_torch: list[int] = []
        self._on_device: DeviceRows | None = None
        self._rules: list[_C.TokenRules | None] = []
        self._tokens: list[npt.NDArray[np.int32] | None] = []
        self._guided = [(at, row) for at, row in enumerate(sampled) if row is not None and row.guided is not None]
        if self.is_greedy:
            self._records = np.frombuffer(GREEDY * len(sequences), ROW_RULES)
            return
        packed = [GREEDY if row is None else row.packed for row in sampled]
        self._by_torch = [index for index, record in enumerate(packed) if not record]
        self._records = np.frombuffer(bytearray(b"".join([record or GREEDY for record in packed])), ROW_RULES)
        self._records["seed"] = [sequence.seed for sequence in sequences]
        rules = [None if row is None else row.token_rules for row in sampled]
        if any(rules):
            pairs = zip(rules, sequences, strict=True)
            self._rules, self._tokens = rules, [None if rule is None else sequence.tokens for rule, sequence in pairs]

    @property
    def records(self) -> npt.NDArray[np.void]:
        """The records of `sample_rows`, one a sequence."""
        return self._records

    @property
    def needs_tokens(self) -> bool:
        """Whether the host must know a sequence's tokens to choose the next one."""
        if self.is_greedy:
            return False
        rows = [sequence.sampled_row for sequence in self._sequences]
        return any(row is not None and row.needs_tokens for row in rows)

    def begin(self, logits: torch.Tensor, positions: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the tokens of `sample` on the logits' device, without a wait; -1 for rows without one.

        For sequences of which it needs no tokens, on a CPU and where `ops.can_sample_rows`.
        """
        if can_sample(logits):
            return torch.from_numpy(self._native(logits, positions))
        return self._rows_on_device(logits).begin(_with_rows_side_by_side(logits), positions)

    def sample(self, logits: torch.Tensor, positions: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return one token a row. positions: the number of generated tokens of each. Raise as the function `sample`."""
        if not self._sequences:
            return np.empty(0, np.int32)
        if self._guided:
            self._follow_guides(positions)
        if can_sample(logits):
            tokens = self._native(logits, positions)
        elif ops.can_sample_rows(logits):
            tokens = self._device(logits, positions)
        else:
            tokens = self._torch(logits, self._sequences)
        if np.minimum.reduce(tokens) < 0:
            bad: list[int] = np.flatnonzero(tokens < 0).tolist()
            raise LogitsNotFinite(bad, [self._sequences[row].request_id for row in bad])
        return tokens

    def _native(self, logits: torch.Tensor, positions: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        if self.is_greedy:
            return sample_rows(logits, self._records)
        self._records["position"] = positions
        return self._with_torch(logits, sample_rows(logits, self._records, self._rules, self._tokens))

    def _follow_guides(self, positions: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Let the rows' rules say which tokens may come next."""
        for at, row in self._guided:
            begin = row.num_prompt_tokens
            row.follow_guide(self._sequences[at].tokens[begin : begin + int(positions[at])])
            if row.token_rules is not None and row.mask is not None:
                row.token_rules.allow(row.mask)

    def _device(self, logits: torch.Tensor, positions: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        rows = _with_rows_side_by_side(logits)
        return self._with_torch(logits, self._rows_on_device(logits).sample(rows, positions))

    def _rows_on_device(self, logits: torch.Tensor) -> DeviceRows:
        if self._on_device is None or not self._on_device.serves(logits):
            self._on_device = DeviceRows(self._sequences, self._records, logits.shape[1], logits.device)
        return self._on_device

    def _with_torch(self, logits: torch.Tensor, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the tokens with those of rows that only torch serves."""
        if self._by_torch:
            torch_sequences = [self._sequences[index] for index in self._by_torch]
            tokens[self._by_torch] = self._torch(logits[self._by_torch], torch_sequences)
        return tokens

    @staticmethod
    def _torch(logits: torch.Tensor, sequences: Sequence[SampledSequence]) -> npt.NDArray[np.int32]:
        return np.array(sample_by_torch(logits, sequences), np.int32)


def _with_rows_side_by_side(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def sample_by_torch(logits: torch.Tensor, sequences: Sequence[SampledSequence]) -> list[int]:
    """Return one token a row; -1 for rows that hold NaN or +inf, or no finite number, before or after their processing.

    logits: [len(sequences), vocab_size]. Where a row is unusable before it is processed, no row is.
    """
    highest, tokens = logits.max(dim=-1)
    bad = [row for row in rows_not_finite(highest) if not sequences[row].params.remove_invalid_values]
    if not bad:
        for rows in _parts(sequences, logits.shape[1]):
            bad += _choose(logits, sequences, rows, tokens)
    tokens[bad] = -1
    chosen: list[int] = tokens.tolist()
    return chosen


def _parts(sequences: Sequence[SampledSequence], vocab_size: int) -> Iterator[list[int]]:
    """Yield the rows that have rules, PART_SIZE logits at once: first greedy rows, then those that are drawn."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampled_row is not None]
    size = max(PART_SIZE // vocab_size, 1)
    for is_greedy in (True, False) if rows else ():
        kind_rows = [row for row in rows if sequences[row].params.is_greedy is is_greedy]
        yield from (kind_rows[begin : begin + size] for begin in range(0, len(kind_rows), size))


def _choose(
    logits: torch.Tensor, sequences: Sequence[SampledSequence], rows: list[int], tokens: torch.Tensor
) -> list[int]:
    """Set the tokens of these rows. Return the rows in which no token is left to choose."""
    row_sequences = [sequences[row] for row in rows]
    sampled = [sequence.sampled_row for sequence in row_sequences if sequence.sampled_row is not None]
    token_ids = [sequence.tokens[: sequence.num_tokens] for sequence in row_sequences]
    padded = padded_scores(logits[rows] if len(rows) < len(logits) else logits)
    scores = padded[:, : logits.shape[1]]
    process_logits(scores, sampled, token_ids)
    if row_sequences[0].params.is_greedy:
        watermark(scores, sampled, token_ids)
        highest, tokens[rows] = scores.max(dim=-1)
        return [rows[index] for index in rows_not_finite(highest)]
    if bad := rows_not_finite(block_maxima(padded).amax(dim=-1)):
        return [rows[index] for index in bad]
    warp(padded, logits.shape[1], sampled, token_ids)
    positions = [sequence.num_generated for sequence in row_sequences]
    tokens[rows] = _draw(padded, uniforms([sequence.seed for sequence in row_sequences], positions))
    return []


def padded_scores(logits: torch.Tensor) -> torch.Tensor:
    """Return a copy in fp32, with columns of -inf up to a whole number of blocks."""
    num_columns = -(-logits.shape[1] // BLOCK) * BLOCK
    scores = torch.empty((len(logits), num_columns), dtype=torch.float32, device=logits.device)
    scores[:, : logits.shape[1]] = logits
    scores[:, logits.shape[1] :] = -torch.inf
    return scores


def warp(padded: torch.Tensor, vocab_size: int, rows: Sequence[SampledRow], token_ids: TokenArrays) -> None:
    """Turn the scores of rows, in place, into the logarithms of the weights by which tokens are drawn."""
    warpings = np.array([row.warping for row in rows])
    scale(padded, warpings[:, 0])
    cut(padded, warpings[:, 1].astype(np.int64), warpings[:, 2], warpings[:, 3], vocab_size)
    if any(row.library is not None for row in rows):
        scores = padded[:, :vocab_size]
        warp_by_library(scores, rows, token_ids)
        watermark(scores, rows, token_ids)
        padded -= block_maxima(padded).amax(dim=-1, keepdim=True)


def _draw(scores: torch.Tensor, points: npt.NDArray[np.float64]) -> torch.Tensor:
    """Return the token of each row at a point in [0, 1) of its distribution: first find a block, then a token in it."""
    blocks = in_blocks(to_weights(scores))
    sums = blocks.sum(dim=-1).double()
    ends = sums.cumsum(dim=-1)
    targets = torch.from_numpy(points).to(scores.device)[:, None] * ends[:, -1:]
    block_ids = torch.searchsorted(ends, targets, right=True)
    inside = (targets - ends.gather(1, block_ids)) / sums.gather(1, block_ids) + 1
    weights = blocks[torch.arange(len(scores), device=scores.device), block_ids.squeeze(1)].double().cumsum(dim=-1)
    targets = inside.clamp(0, BELOW_ONE) * weights[:, -1:]
    return (block_ids * BLOCK + torch.searchsorted(weights, targets, right=True)).squeeze(1)
