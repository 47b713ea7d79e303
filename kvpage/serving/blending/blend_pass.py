"""BlendPass: one forward pass in which some tokens have K and V already, out of segments (CacheBlend).

    a blended prompt     [ prefix | segment A . . . | new | segment B . . . | question ]
    K and V in           blocks     segments          -     segments          -
    computed up to the check layer  # # # # # # # # # # # # # # # # # # # # # # # # # # #
    and after it                    . # . . . . . . # # # # . . # . . . . . # # # # # # #

The check layer chooses rows of the reused tokens of each prompt. Of the rows whose sensitivity the segments know, it
chooses those with the largest. Of the others it chooses those whose K or V differ most from the segments'. It takes the
same share of both kinds. After it, a layer's blocks first get the segments' rows, with K rotated to the tokens'
positions, then the fresh rows over these. A chosen row attends to all keys up to its own position.

With filters several layers choose, each among the rows that are left. Other sequences of the same pass are computed as
ever, and which layer chooses for a prompt does not depend on them. Where layer 0 would choose without its K and V, rows
are chosen before it, and no row is computed for all prompts.

After an exception, blocks may hold K and V that are not committed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch

from kvpage import ops
from kvpage.blend.config import BlendConfig
from kvpage.blend.mixing import mix
from kvpage.blend.rotary import RotaryTables
from kvpage.blend.segments import Reuse
from kvpage.blend.selection import Selection, ranks, seam_weights, select_tokens, token_deviation
from kvpage.layout.attention import Attention
from kvpage.layout.rotation import Rotation
from kvpage.serving.blending.row_uploads import RowUploads, sent
from kvpage.serving.model.attention import IN_PLACE_DTYPES, attend_rows, row_dtype, write_rows
from kvpage.serving.model.row_hooks import RowHooks, RowsChosen
from kvpage.serving.model.step import BatchItem, Step

PAD_SLOT = -1  # written nowhere


class BlendCounts(NamedTuple):
    """Numbers of an item's tokens that segments had: kept as they were, and computed again."""

    num_reused: int
    num_recomputed: int


class BlendPass:
    """See above. layers: the decoder's, whose hooks it sets. rotary: of each of them, None where K is not rotated."""

    def __init__(
        self,
        config: BlendConfig,
        layers: Sequence[torch.nn.Module],
        rotary: Sequence[RotaryTables | None],
        step: Step,
        items: Sequence[BatchItem],
    ) -> None:
        self._config, self._layers, self._rotary, self._items = config, layers, rotary, items
        self._chose_at = -1  # the layer that has chosen last; -1, too, of a choice before the first one
        self._step = step
        self._order = {layer: index for index, layer in enumerate(step.caches)}
        self._first_rows = np.cumsum([0, *step.query_lens])
        self._reuses = [reuse for item in items for reuse in item.reuse]
        rows = [
            first + reuse.start - item.start + np.arange(reuse.num_tokens)
            for first, item in zip(self._first_rows, items, strict=False)
            for reuse in item.reuse
        ]
        device = step.slot_mapping.device
        self._uploads = RowUploads(self._reuses, device)
        self._rows = sent(torch.from_numpy(np.concatenate(rows)), device)
        offsets = torch.cat([reuse.begin + torch.arange(reuse.num_tokens) for reuse in self._reuses])
        self._weights = sent(seam_weights(offsets, config.seam), device)  # of the reused rows
        sensitivity, is_known, item_ids = _known(items, config)
        self._knows_all = bool(is_known.all())
        self._sensitivity, self._is_known, item_ids = (sent(part, device) for part in (sensitivity, is_known, item_ids))
        self._kinds = 2 * item_ids + self._is_known  # of the reused rows: those of one item and kind compare
        self._stages = _stages(items, config, len(layers))
        self._rotations: dict[RotaryTables | None, list[Rotation | None]] = {}
        self._open_slots: Sequence[torch.Tensor] = ()  # of each reused run, PAD_SLOT where a row was chosen
        self._selection: Selection | None = None
        self._narrowed = step  # of the rows that are computed: in the end, of those that were chosen
        if _needs_no_look(items, config, self._stages):
            self._narrow(-1, self._choose(self._stages.pop(0), None))

    @property
    def num_rows(self) -> int:
        return int(self._first_rows[-1])

    def hooks(self) -> AbstractContextManager[None]:
        """See StepBlend."""
        is_narrow = self._selection is not None
        return RowHooks(self._layers, [*self._stages], self.num_rows, lambda: self.selection.indices, is_narrow).on()

    @property
    def selection(self) -> Selection:
        """The latest choice among all rows of the pass. RuntimeError before the first."""
        if self._selection is None:
            raise RuntimeError("selection is there once a check layer has been computed")
        return self._selection

    def counts(self) -> list[BlendCounts]:
        """Return the counts of each item, once the last check layer has been computed."""
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
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, attention: Attention
    ) -> torch.Tensor:
        """See StepBlend. Raises RowsChosen out of a check layer's first call."""
        index = self._order[layer]
        if self._selection is not None and index > self._chose_at:
            self._fill(index, layer, key)
        write_rows(key, value, layer, self._step, self._narrowed.slot_mapping)
        if index in self._stages and index > self._chose_at:
            self._narrow(index, self._choose(self._stages[index], (index, key, value)))
            raise RowsChosen
        return attend_rows(query, key, value, layer, self._narrowed, attention)

    def _narrow(self, index: int, selection: Selection) -> None:
        self._chose_at, self._selection = index, selection
        self._narrowed = self._step.of_rows(selection.indices)
        self._open_slots = self._slots_not_chosen(selection)

    def _fill(self, index: int, layer: int, like: torch.Tensor) -> None:
        """Write the segments' rows into the blocks, in one pass if the cache keeps numbers as they are."""
        step = self._step
        caches = self._open_blocks(layer)
        if caches is None:
            write_rows(*self._retrieved(index, like), layer, step, step.slot_mapping[self._rows])
            return
        rows = zip(*self._uploads.rows(index), self._rotations_of(index), self._open_slots, strict=True)
        for key, value, rotation, slots in rows:
            ops.mix_rows(key.to(like.device), caches[0], rotation, out_slots=slots)
            ops.mix_rows(value.to(like.device), caches[1], None, out_slots=slots)

    def _open_blocks(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the layer's K and V, [num_blocks, block_size, kv heads, size]; None if rows do not fit in."""
        layout, rows = self._step.layout, self._reuses[0].segment.k
        key, value = self._step.caches[layer].views
        dtypes = {reuse.segment.k.dtype for reuse in self._reuses}
        is_plain = layout.dtype in IN_PLACE_DTYPES and dtypes <= {layout.dtype}
        if not is_plain or value is None or key.rows.shape[3] > 1 or value.rows.shape[3] > 1:
            return None
        return key.rows[..., 0, : rows.shape[-1]], value.rows[..., 0, : rows.shape[-1]]

    def _retrieved(self, index: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K, rotated, and V of the reused rows in one layer: [num rows, kv heads, head size] each."""
        dtype = row_dtype(like.dtype, self._step.layout)
        keys, values = [], []
        for *rows, rotation in zip(*self._uploads.rows(index), self._rotations_of(index), strict=True):
            key, value = (part.to(like.device, dtype) for part in rows)
            keys.append(key if rotation is None else mix(key, 0, key.shape[-1], rotation))
            values.append(value)
        return torch.cat(keys), torch.cat(values)

    def _rotations_of(self, index: int) -> list[Rotation | None]:
        """Of each reused run, from where its K was computed to where it is: the same in all layers of a kind."""
        rotary = self._rotary[index]
        if rotary not in self._rotations:
            rotations = [None if rotary is None else self._rotation(rotary, reuse) for reuse in self._reuses]
            self._rotations[rotary] = rotations
        return self._rotations[rotary]

    def _rotation(self, rotary: RotaryTables, reuse: Reuse) -> Rotation:
        old = reuse.segment.positions[reuse.begin : reuse.begin + reuse.num_tokens]
        return rotary.rotation(old, torch.arange(reuse.start, reuse.start + reuse.num_tokens), self._rows.device)

    def _slots_not_chosen(self, selection: Selection) -> Sequence[torch.Tensor]:
        slots = self._step.slot_mapping.clone()
        slots[selection.indices] = PAD_SLOT
        return torch.split(slots[self._rows], [reuse.num_tokens for reuse in self._reuses])

    def _choose(self, ratios: list[float], fresh: tuple[int, torch.Tensor, torch.Tensor] | None) -> Selection:
        """fresh: a layer, and its K and V of the rows that are computed so far; None where there is nothing to see."""
        device = self._rows.device
        valid, left = (torch.zeros(self.num_rows, dtype=torch.bool, device=device) for _ in range(2))
        valid[self._rows] = True
        left[self._selection.indices if self._selection else slice(None)] = True
        is_left = left[self._rows]
        candidates = self._rows[is_left]
        scores = self._sensitivity[is_left]
        if fresh is not None and not self._knows_all:
            deviation = self._deviation(*fresh, candidates, left)
            scores = torch.where(self._is_known[is_left], scores, deviation)
        score = torch.zeros(self.num_rows, device=device)
        score[candidates] = ranks(scores, self._kinds[is_left])
        return select_tokens(score, valid, self._first_rows.tolist(), ratios, left)

    def _deviation(
        self, index: int, key: torch.Tensor, value: torch.Tensor, candidates: torch.Tensor, left: torch.Tensor
    ) -> torch.Tensor:
        """Return how far the candidates, reused rows that are left, differ from their segments.

        key, value: of all rows that are left.
        """
        places, is_left = left.cumsum(0)[candidates] - 1, left[self._rows]
        all_candidates = torch.ones_like(candidates, dtype=torch.bool)
        deviation = torch.zeros(len(candidates), device=key.device)
        for part, fresh, retrieved in zip("kv", (key, value), self._retrieved(index, key), strict=True):
            if part in self._config.metric:
                rows = retrieved[is_left, ..., : fresh.shape[-1]]
                deviation += token_deviation(fresh[places], rows, all_candidates, 0)
        return deviation * self._weights[is_left]


def _known(items: Sequence[BatchItem], config: BlendConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return for each reused row its sensitivity, 0 where it is not known; whether it is; and the index of its item.

    Exact rows would be known. Beside some that are not, they are ranked with those, and last: none is to be chosen.
    """
    sensitivity, is_known, item_ids = [], [], []
    for index, item in enumerate(items):
        is_all_known = _is_known(item, config)
        for reuse in item.reuse:
            counts = config.uses_sensitivity and (is_all_known or not reuse.is_exact)
            values = reuse.sensitivity() if counts else None
            sensitivity.append(torch.zeros(reuse.num_tokens) if values is None else values)
            is_known.append(torch.full((reuse.num_tokens,), values is not None))
            item_ids.append(torch.full((reuse.num_tokens,), index))
    return torch.cat(sensitivity), torch.cat(is_known), torch.cat(item_ids)


def _stages(items: Sequence[BatchItem], config: BlendConfig, num_layers: int) -> dict[int, list[float]]:
    """Return, for each layer that chooses in any item, the share of each item's rows that goes on after it."""
    stages_by_item = [config.stages_of(num_layers, _is_known(item, config)) if item.reuse else () for item in items]
    layers = sorted({stage.layer for stages in stages_by_item for stage in stages})
    return {
        layer: [min([1.0, *(stage.ratio for stage in stages if stage.layer <= layer)]) for stages in stages_by_item]
        for layer in layers
    }


def _needs_no_look(items: Sequence[BatchItem], config: BlendConfig, stages: dict[int, list[float]]) -> bool:
    """Return whether layer 0 chooses, and can do so without its K and V: all rows of the items have a sensitivity."""
    ratios = stages.get(0)
    return ratios is not None and all(
        ratio == 1 or _is_known(item, config) for ratio, item in zip(ratios, items, strict=True)
    )


def _is_known(item: BatchItem, config: BlendConfig) -> bool:
    """Return whether all of its reused rows have a sensitivity that counts."""
    return config.uses_sensitivity and all(reuse.sensitivity() is not None for reuse in item.reuse)
