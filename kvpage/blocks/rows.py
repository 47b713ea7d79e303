"""SequenceSteps: the calls of a step for many sequences at once, by rows: numbers that are looked up once.

    rows = manager.rows.of(seq_ids)                          once; again where other sequences take part
    ┌─► manager.rows.append(rows)                            room for one token each
    │   manager.do_moves(cache.do_move)
    │   slots, tables, lengths = manager.rows.inputs(rows)   where to write K and V, and what to attend to
    │   ... the model computes ...
    └── manager.rows.commit(rows, tokens)                    one token each

A row is an int64 number. It names its sequence as long as that is on the device. After `release` or `swap_out` the
number is refused: it never names another sequence.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpage.blocks.sequence_state import Ids, SeqId, Slots
from kvpage.blocks.sequences.growth import append
from kvpage.blocks.sequences.sequences import Rows, Sequences
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import as_counts, as_positions

MANY_TOKENS = 1 << 60  # no pool has blocks for them


class StepInputs(NamedTuple):
    """The arguments of a step that computes the last token of each sequence. The arrays are the caller's.

    Attributes:
        slots: The slot of each last token, int64 [num_seqs].
        block_tables: int32 [num_seqs, max_blocks], with 0 after a sequence's last block.
        seq_lens: Tokens of each sequence, its last one included, int64 [num_seqs].
    """

    slots: Slots
    block_tables: Ids
    seq_lens: Slots


class SequenceSteps:
    """Steps of the sequences of a BlockManager, of which each manager has one as `manager.rows`.

    As in the manager, each method gives all or nothing. Every method raises KeyError for a row whose sequence is not on
    the device.
    """

    def __init__(self, sequences: Sequences) -> None:
        self._space = sequences.space
        self._sequences = sequences

    def of(self, seq_ids: Sequence[SeqId]) -> npt.NDArray[np.int64]:
        """Return the rows of sequences, int64 [num_seqs].

        Args:
            seq_ids: Sequences on the device.
        """
        return np.array(self._sequences.rows_of(seq_ids), np.int64)

    def append(self, rows: Rows, num_new_tokens: Sequence[int] | int = 1) -> None:
        """Make room for more tokens in each sequence, as BlockManager.append does.

        Args:
            rows: Distinct rows, int64 [num_seqs].
            num_new_tokens: One number for each sequence, or one for all.

        Raises:
            OutOfBlocks: The tokens do not fit.
            ValueError: Rows repeat, a number is negative, or there is another number of numbers.
        """
        is_one = type(num_new_tokens) is int and num_new_tokens == 1
        append(self._sequences, rows, 1 if is_one else _counts(num_new_tokens, len(rows)))

    def num_blocks_to_append(self, rows: Rows, num_new_tokens: Sequence[int] | int = 1) -> int:
        """Return how many blocks `append` takes. Raise ValueError as it does."""
        return self._sequences.rows.num_blocks_to_append(rows, _counts(num_new_tokens, len(rows)))

    def inputs(self, rows: Rows) -> StepInputs:
        """Return the arguments of a step that computes the last token of each sequence.

        Args:
            rows: Rows, int64 [num_seqs].

        Raises:
            RuntimeError: There are moves to make. They would overwrite tokens that are written now.
            ValueError: A sequence has no token, or has given back the block of its last one.
        """
        self._check_moved()
        return StepInputs(*self._sequences.rows.last(rows))

    def slots(self, rows: Rows, starts: Sequence[int] | Slots, ends: Sequence[int] | Slots) -> Slots:
        """Return the slots of the positions [starts[i], ends[i]) of each sequence, int64, one sequence after the other.

        Args:
            rows: Rows, int64 [num_seqs].
            starts: First position of each sequence.
            ends: The position after the last one of each sequence.

        Raises:
            RuntimeError: There are moves to make. They would overwrite tokens that are written now.
            ValueError: A position is out of range.
        """
        self._check_moved()
        first, last = as_positions("starts", starts, len(rows)), as_positions("ends", ends, len(rows))
        return self._sequences.rows.slots(rows, first, last)

    def tables(self, rows: Rows) -> Ids:
        """Return the block tables, int32 [num_seqs, max_blocks], with 0 after a sequence's last block.

        Args:
            rows: Rows, int64 [num_seqs].

        Raises:
            RuntimeError: There are moves to make.
        """
        self._check_moved()
        return self._sequences.rows.tables(rows)

    def commit(self, rows: Rows, tokens: Tokens) -> None:
        """Record that K and V of one more token of each sequence have been written, as BlockManager.commit does.

        A full block for which the prefix tree finds no memory is cached by the sequence's next commit.

        Args:
            rows: Distinct rows, int64 [num_seqs].
            tokens: One token id for each.

        Raises:
            ValueError: There is no room for a token, rows repeat, or there is another number of tokens.
        """
        num_cached = self._sequences.rows.commit_each(rows, as_tokens(tokens))
        if num_cached and self._space.writes_at_once:
            for row in np.asarray(rows).tolist():
                self._sequences.write_out(row)

    def _check_moved(self) -> None:
        if self._space.has_moves:
            raise RuntimeError("do_moves must be called before a step")


def _counts(num_new_tokens: Sequence[int] | int, num_rows: int) -> int | list[int]:
    if type(num_new_tokens) is int:
        return min(num_new_tokens, MANY_TOKENS)
    return [min(count, MANY_TOKENS) for count in as_counts("num_new_tokens", num_new_tokens, num_rows)]
