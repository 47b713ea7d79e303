"""Choose tokens on a device by its kernels, with the records and tables of the rows kept there from step to step.

    a row's record   seed, temperature, top_k ...         uploaded once, for as long as the same rows are sampled
    position         how many tokens were generated       uploaded with each step, 8 bytes a row
    tables           a word and a bias for each token     of rows with rules that name tokens; the kernel counts in them

A token is the one that a CPU chooses from the same bits of logits.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvpage import ops
from kvpage.layout.sampling_record import DRAW, ROW_RULES, SAMPLING_RECORD, SamplingRecord
from kvpage.ops.cuda.uploads import upload
from kvpage.serving.sampling.native_rows import GREEDY
from kvpage.serving.sampling.sampled_row import SampledRow
from kvpage.serving.sampling.token_tables import TokenTables


class DeviceSequence(Protocol):
    """A sequence, as kernels that choose its token need it; see SampledSequence."""

    @property
    def sampled_row(self) -> SampledRow | None:
        """The rules as arrays; None where the likeliest token is taken as it is."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The prompt and the generated tokens, then room for more."""


class HeldTables(NamedTuple):
    """The tables of a row whose words hold its sequence's first `num_tokens` tokens."""

    row: int
    tables: TokenTables
    num_tokens: int


class DeviceRows:
    """Sequences that are sampled together on a device, for as long as they stay the same.

    records: their rows of `sample_rows`, see kvpage.serving.sampling.native_rows.
    """

    def __init__(
        self,
        sequences: Sequence[DeviceSequence],
        records: npt.NDArray[np.void],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._sequences, self._vocab_size, self._device = sequences, vocab_size, device
        rows = [sequence.sampled_row for sequence in sequences]
        self._tables = [None if row is None else row.tables_on(device, vocab_size) for row in rows]
        (self._records,) = upload([_packed_records(rows, self._tables, records)], device)
        self._positions = torch.zeros(len(rows), dtype=torch.int64, device=device)
        self._staged = torch.zeros(len(rows), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._out = torch.empty(len(rows), dtype=torch.int32, device=device)
        self._memory = ops.SamplingMemory.make(len(rows), vocab_size, device)

    @property
    def records(self) -> torch.Tensor:
        """The rows' records of `ops.sample_rows`, on the device. They serve as long as this is kept."""
        return self._records

    def hold(self, positions: Sequence[int] | npt.NDArray[np.int64]) -> list[HeldTables]:
        """Have all tables hold their sequences' tokens up to these positions, for one call of `ops.sample_rows`.

        Return those that count tokens. They count the call's, too: `note_chosen` tells which.
        """
        held_tables = [
            HeldTables(index, tables, row.num_prompt_tokens + int(positions[index]))
            for index, (tables, sequence) in enumerate(zip(self._tables, self._sequences, strict=True))
            if tables is not None and tables.counts and (row := sequence.sampled_row) is not None
        ]
        for index, tables, num_tokens in held_tables:
            tables.hold(self._sequences[index].tokens[:num_tokens])
            tables.note_chosen(num_tokens, -1)  # if the call raises, nobody knows what the kernel has counted
        for known, sequence in zip(self._tables, self._sequences, strict=True):
            if known is not None and (row := sequence.sampled_row) is not None and row.mask is not None:
                known.allow(row.mask)
        return held_tables

    def serves(self, logits: torch.Tensor) -> bool:
        """Whether such logits are what it was made for."""
        return logits.device == self._device and logits.shape[1] == self._vocab_size

    def begin(self, logits: torch.Tensor, positions: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return what `sample` does, on the device and without a wait; the next call overwrites it.

        No rule of any row may count tokens: the host may not know the last one.
        """
        (device_positions,) = upload([positions], self._device)
        ops.sample_rows(logits, self._records, device_positions, self._out, self._memory)
        return self._out

    def sample(self, logits: torch.Tensor, positions: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return one token a row; -1 for rows without one. The only wait is for the tokens."""
        held_tables = self.hold(positions)
        self._staged.numpy()[:] = positions
        self._positions.copy_(self._staged, non_blocking=True)
        ops.sample_rows(logits, self._records, self._positions, self._out, self._memory)
        chosen: npt.NDArray[np.int32] = self._out.cpu().numpy().copy()
        for index, tables, num_tokens in held_tables:
            tables.note_chosen(num_tokens, int(chosen[index]))
        return chosen


def choose_for_nobody(logits: torch.Tensor) -> None:
    """Choose a token from each row of logits that belongs to no sequence, where kernels choose: they are compiled."""
    if not ops.can_sample_rows(logits):
        return
    num_rows, logits = len(logits), logits if logits.stride(1) == 1 else logits.contiguous()
    rows = DeviceRows([_NOBODY] * num_rows, np.frombuffer(GREEDY * num_rows, ROW_RULES), logits.shape[1], logits.device)
    rows.begin(logits, np.zeros(num_rows, np.int64))


class _Nobody(NamedTuple):
    """A sequence without rules and tokens."""

    sampled_row: None = None
    tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)


_NOBODY = _Nobody()


def _packed_records(
    rows: Sequence[SampledRow | None], tables: Sequence[TokenTables | None], records: npt.NDArray[np.void]
) -> npt.NDArray[np.int64]:
    """Return the records of `ops.sample_rows`, [num_rows, words of a record]. They hold the tables' addresses."""
    packed = np.array([_record(row, row_tables) for row, row_tables in zip(rows, tables, strict=True)], SAMPLING_RECORD)
    for name in DRAW:
        packed[name] = records[name]
    return packed.view(np.int64).reshape(len(rows), ops.SAMPLING_RECORD_WORDS)


def _record(row: SampledRow | None, tables: TokenTables | None) -> SamplingRecord:
    """Return a record with the rules that name tokens; the other fields are those of a greedy row."""
    if row is None or tables is None:
        return SamplingRecord()
    repetition, presence, frequency = row.penalties
    return SamplingRecord(
        words=0 if tables.words is None else tables.words.data_ptr(),
        biases=0 if tables.biases is None else tables.biases.data_ptr(),
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        counts=int(tables.counts),
        barred_until=row.barred_until - row.num_prompt_tokens,
        first_at=row.first_at - row.num_prompt_tokens,
    )
