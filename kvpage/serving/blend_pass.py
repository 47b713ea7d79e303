"""BlendPass: one forward pass in which some tokens have K and V already, out of segments (CacheBlend).

    a blended prompt     [ prefix | segment A . . . | new | segment B . . . | question ]
    K and V in           blocks     segments          -     segments          -
    computed up to the check layer  # # # # # # # # # # # # # # # # # # # # # # # # # # #
    and behind it                   . # . . . . . . # # # # . . # . . . . . # # # # # # #

The check layer compares K or V of the reused tokens with what the segments say, and chooses. Behind it, a layer's
blocks first get the segments' rows, K turned to where the tokens stand now, then the fresh rows over these; a chosen
row attends to all keys up to its own position. Other sequences of the same pass are computed as ever.

An exception leaves K and V behind in blocks that nobody has committed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage import ops
from kvpage.blend.config import BlendConfig
from kvpage.blend.rotary import RotaryTables
from kvpage.blend.selection import Selection, select_tokens, token_deviation
from kvpage.serving.attention import attend_rows, row_dtype, write_rows
from kvpage.serving.dense_attention import AttentionOptions, attend
from kvpage.serving.row_hooks import RowHooks, RowsChosen
from kvpage.serving.step import Piece, Step


class BlendCounts(NamedTuple):
    """Tokens of a piece that segments had: kept as they were, and computed again."""

    num_reused: int
    num_recomputed: int


class _SparseRows(NamedTuple):
    """The rows of one sequence, some of which were not chosen.

    rows: among the chosen ones of all. seq: which sequence. positions: of its chosen rows.
    """

    rows: slice
    seq: int
    positions: npt.NDArray[np.int64]


class _Chosen(NamedTuple):
    """What the layers behind the check layer compute: rows, their slots, and how they attend.

    whole, whole_rows: the sequences all of whose rows were chosen, as a step of their own, and their rows.
    """

    selection: Selection
    slots: torch.Tensor
    sparse: list[_SparseRows]
    whole: Step | None
    whole_rows: torch.Tensor


class BlendPass:
    """See above. layers: the decoder's, whose hooks it sets. rotary: of each of them, None where K is not turned."""

    def __init__(
        self,
        config: BlendConfig,
        layers: Sequence[torch.nn.Module],
        rotary: Sequence[RotaryTables | None],
        step: Step,
        pieces: Sequence[Piece],
    ) -> None:
        self._config, self._layers, self._rotary, self._pieces = config, layers, rotary, pieces
        self._step = step
        self._order = {layer: index for index, layer in enumerate(step.caches)}
        self._first_rows = np.cumsum([0, *step.query_lens])
        self._reuses = [reuse for piece in pieces for reuse in piece.reuse]
        rows = [
            first + reuse.start - piece.start + np.arange(reuse.num_tokens)
            for first, piece in zip(self._first_rows, pieces, strict=False)
            for reuse in piece.reuse
        ]
        device = step.slot_mapping.device
        self._rows = torch.from_numpy(np.concatenate(rows)).to(device)
        self._old = torch.cat([one.segment.positions[one.begin : one.begin + one.num_tokens] for one in self._reuses])
        self._new = torch.cat([torch.arange(one.start, one.start + one.num_tokens) for one in self._reuses])
        self._old, self._new = self._old.to(device), self._new.to(device)
        self._chosen: _Chosen | None = None

    @property
    def num_rows(self) -> int:
        return int(self._first_rows[-1])

    def hooks(self) -> AbstractContextManager[None]:
        """See StepBlend."""
        return RowHooks(self._layers, self._config.check_layer, self.num_rows, lambda: self.selection.indices).on()

    @property
    def selection(self) -> Selection:
        """What the check layer has chosen, among all rows of the pass. RuntimeError before it has."""
        if self._chosen is None:
            raise RuntimeError("selection is there once the check layer has been computed")
        return self._chosen.selection

    def counts(self) -> list[BlendCounts]:
        """Of each piece, once the check layer has been computed."""
        is_reused = np.zeros(self.num_rows, dtype=bool)
        is_reused[self._rows.cpu().numpy()] = True
        is_chosen = np.zeros(self.num_rows, dtype=bool)
        is_chosen[self.selection.indices.cpu().numpy()] = True
        spans = [slice(*bounds) for bounds in zip(self._first_rows[:-1], self._first_rows[1:], strict=True)]
        return [
            BlendCounts(int((is_reused & ~is_chosen)[span].sum()), int((is_reused & is_chosen)[span].sum()))
            for span in spans
        ]

    # --- a layer -----------------------------------------------------------------------------------------------------

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepBlend. RowsChosen out of the check layer's first call."""
        index, step = self._order[layer], self._step
        if index < self._config.check_layer:
            write_rows(key, value, layer, step, step.slot_mapping)
            return attend_rows(query, key, value, layer, step, options)
        if self._chosen is None:
            write_rows(key, value, layer, step, step.slot_mapping)
            self._chosen = self._choose(index, key, value)
            raise RowsChosen
        if index > self._config.check_layer:
            write_rows(*self._retrieved(index, key), layer, step, step.slot_mapping[self._rows])
        write_rows(key, value, layer, step, self._chosen.slots)
        return self._attend_chosen(self._chosen, query, key, value, layer, options)

    def _retrieved(self, index: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K, turned, and V of the reused rows in one layer: [num rows, kv heads, head size] each."""
        spans = [(one.segment, slice(one.begin, one.begin + one.num_tokens)) for one in self._reuses]
        dtype = row_dtype(like.dtype, self._step.layout)
        key = torch.cat([segment.k[index, span] for segment, span in spans]).to(like.device, dtype)
        value = torch.cat([segment.v[index, span] for segment, span in spans]).to(like.device, dtype)
        rotary = self._rotary[index]
        return key if rotary is None else rotary.turn(key, self._old, self._new), value

    def _choose(self, index: int, key: torch.Tensor, value: torch.Tensor) -> _Chosen:
        retrieved = dict(zip("kv", self._retrieved(index, key), strict=True))
        fresh = {"k": key[self._rows], "v": value[self._rows]}
        valid = torch.zeros(self.num_rows, dtype=torch.bool, device=key.device)
        valid[self._rows] = True
        everything = torch.ones_like(self._rows, dtype=torch.bool)
        deviation = torch.zeros(self.num_rows, device=key.device)
        for part in self._config.metric:
            size = fresh[part].shape[-1]
            deviation[self._rows] += token_deviation(fresh[part], retrieved[part][..., :size], everything, 0)
        ratios = [self._config.ratio] * len(self._pieces)
        return self._narrowed(select_tokens(deviation, valid, self._first_rows.tolist(), ratios))

    def _narrowed(self, selection: Selection) -> _Chosen:
        step, rows = self._step, selection.indices.cpu().numpy()
        bounds = selection.query_start_loc.tolist()
        whole: list[int] = []
        whole_rows: list[npt.NDArray[np.int64]] = []
        sparse = []
        for index, piece in enumerate(self._pieces):
            begin, end = bounds[index : index + 2]
            if end - begin == step.query_lens[index]:
                whole.append(index)
                whole_rows.append(np.arange(begin, end))
            else:
                positions = rows[begin:end] - self._first_rows[index] + piece.start
                sparse.append(_SparseRows(slice(begin, end), index, positions))
        device = step.slot_mapping.device
        return _Chosen(
            selection,
            step.slot_mapping[selection.indices],
            sparse,
            replace(step.of_sequences(whole), calls=step.calls) if whole else None,
            torch.from_numpy(np.concatenate(whole_rows)).to(device) if whole else torch.empty(0, dtype=torch.int64),
        )

    def _attend_chosen(
        self,
        chosen: _Chosen,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        options: AttentionOptions,
    ) -> torch.Tensor:
        output = query.new_empty(*query.shape[:2], value.shape[-1])
        if chosen.whole is not None:
            some = chosen.whole_rows
            output[some] = attend_rows(query[some], key[some], value[some], layer, chosen.whole, options)
        for one in chosen.sparse:
            keys, values = self._gathered(one, key, value, layer)
            output[one.rows] = attend(query[one.rows], keys, values, options, one.positions)
        return output

    def _gathered(
        self, one: _SparseRows, key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all of a sequence's tokens, out of its blocks."""
        step, layout = self._step, self._step.layout
        table, num_keys = step.block_tables[one.seq : one.seq + 1], step.seq_lens[one.seq]
        rows = ops.gather_cache(
            step.caches[layer], table, [num_keys], layout, None, None, step.scales.get(layer),
            row_dtype(key.dtype, layout),
        )  # fmt: skip
        keys, values = rows
        assert values is not None
        return keys[..., : key.shape[-1]].to(key.dtype), values[..., : value.shape[-1]].to(value.dtype)
