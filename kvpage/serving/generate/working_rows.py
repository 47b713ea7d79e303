"""WorkingRows: K and V of a cache's rows in one piece a layer, so that a step appends to them and gathers nothing.

    blocks    [ found | written  ]                 what others can find
    working   [ found | written  | new .. | room ]  what attention reads; the new ones are written a block at a time

They take as much memory as the rows' blocks, and a quarter of it, or 64 tokens a row, as room to grow.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvpage.serving.generate.layer_blocks import LayerBlocks
from kvpage.serving.generate.row_slots import RowSlots

_MIN_ROOM = 64  # tokens


@dataclass(slots=True)
class WorkingMemory:
    """What the working rows of a pool's caches take together. max_bytes: None where there is no limit."""

    max_bytes: int | None
    num_bytes: int = 0

    def resize(self, before: int, after: int) -> bool:
        """Whether `after` bytes fit in place of `before`; they then count."""
        total = self.num_bytes - before + after
        if self.max_bytes is not None and total > max(self.max_bytes, self.num_bytes - before):
            return False
        self.num_bytes = total
        return True


class WorkingRows:
    """Of one cache, whose layers have `bytes_per_token` together. They hold K and V bit by bit as the blocks would."""

    def __init__(self, layers: Mapping[int, LayerBlocks], bytes_per_token: int, memory: WorkingMemory) -> None:
        self._layers, self._bytes_per_token, self._memory = layers, bytes_per_token, memory
        self._parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # [num_rows, num_heads, room, size], of a layer
        self._room = self._num_bytes = 0

    @property
    def is_empty(self) -> bool:
        return not self._parts

    def reserve(self, num_rows: int, num_tokens: int) -> bool:
        """Whether there may be room for so many tokens of each row. The rows are those of before, if there are any."""
        if self._parts and num_tokens <= self._room:
            return True
        room = num_tokens + max(num_tokens // 4, _MIN_ROOM)
        num_bytes = num_rows * room * self._bytes_per_token
        if not self._memory.resize(self._num_bytes, num_bytes):
            return False
        self._room, self._num_bytes = room, num_bytes
        return True

    def append(
        self, layer_id: int, new: tuple[torch.Tensor, torch.Tensor], start: int, tables: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer with the new ones from `start` on: [num_rows, num_heads, num_tokens, size].

        What lies before `start` and is not here yet is read out of blocks. tables: see RowSlots.block_tables.
        """
        end, dtype = start + new[0].shape[2], self._layers[layer_id].layout.dtype
        parts = self._parts.get(layer_id)
        if parts is None or parts[0].shape[2] < end:
            grown = tuple(part.new_empty(*part.shape[:2], self._room, part.shape[3], dtype=dtype) for part in new)
            if parts is not None:
                for part, old in zip(grown, parts, strict=True):
                    part[:, :, :start] = old[:, :, :start]
            elif start:
                self._layers[layer_id].read_into(grown[0][:, :, :start], grown[1][:, :, :start], tables())
            self._parts[layer_id] = parts = grown[0], grown[1]
        for part, rows in zip(parts, new, strict=True):
            part[:, :, start:end] = rows
        if start == 0:
            return new
        keys, values = (part[:, :, :end].to(rows.dtype) for part, rows in zip(parts, new, strict=True))
        return keys, values

    def rows(self, layer_id: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A copy of a layer's first tokens; None where nothing of the layer is here."""
        if layer_id not in self._parts:
            return None
        keys, values = (part[:, :, :num_tokens].clone() for part in self._parts[layer_id])
        return keys, values

    def write(self, slots: RowSlots) -> None:
        """Writes every layer's tokens [slots.start, slots.end) into blocks."""
        for layer_id, (keys, values) in self._parts.items():
            span = slice(slots.start, slots.end)
            self._layers[layer_id].write(keys[:, :, span], values[:, :, span], slots.slot_mapping)

    def drop(self) -> None:
        """Nothing is here any more."""
        self._parts = {}
        self._memory.resize(self._num_bytes, 0)
        self._room = self._num_bytes = 0
