"""WorkingRows: K and V of a cache's rows in one piece a layer, so that a forward appends and gathers nothing.

    blocks    [ found | written  ]                  others can find these tokens
    working   [ found | written  | new .. | room ]  attention reads these; new ones go to blocks a block at a time

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
    """The bytes that the working rows of a pool's caches take together. max_bytes: None for no limit."""

    max_bytes: int | None
    num_bytes: int = 0

    def resize(self, before: int, after: int) -> bool:
        """Count `after` bytes in place of `before`. Return False, with nothing changed, if they do not fit."""
        total = self.num_bytes - before + after
        if self.max_bytes is not None and total > max(self.max_bytes, self.num_bytes - before):
            return False
        self.num_bytes = total
        return True


class WorkingRows:
    """The working rows of one cache, which hold K and V bit by bit as the blocks would.

    layers: by layer_idx. bytes_per_token: those of all layers together.
    """

    def __init__(self, layers: Mapping[int, LayerBlocks], bytes_per_token: int, memory: WorkingMemory) -> None:
        self._layers, self._bytes_per_token, self._memory = layers, bytes_per_token, memory
        self._kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # [num_rows, num_heads, room, size], by layer
        self._room = self._num_bytes = 0

    @property
    def is_empty(self) -> bool:
        return not self._kv

    def reserve(self, num_rows: int, num_tokens: int) -> bool:
        """Reserve room for the tokens of each row. Return False, with nothing changed, if memory lacks.

        Where there are rows already, num_rows is their number.
        """
        if self._kv and num_tokens <= self._room:
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
        """Put one layer's new K and V at `start`, and return all: [num_rows, num_heads, num_tokens, size].

        Tokens before `start` that are not here yet are read from blocks. tables: returns RowSlots.block_tables.
        """
        end, dtype = start + new[0].shape[2], self._layers[layer_id].cache.layout.dtype
        pair = self._kv.get(layer_id)
        if pair is None or pair[0].shape[2] < end:
            pair = self._grown(layer_id, new, start, dtype, tables)
        for part, rows in zip(pair, new, strict=True):
            part[:, :, start:end] = rows
        if start == 0:
            return new
        keys, values = (part[:, :, :end].to(rows.dtype) for part, rows in zip(pair, new, strict=True))
        return keys, values

    def _grown(
        self,
        layer_id: int,
        new: tuple[torch.Tensor, torch.Tensor],
        start: int,
        dtype: torch.dtype,
        tables: Callable[[], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make K and V with all of the room, and fill in the tokens before `start`."""
        keys, values = (part.new_empty(*part.shape[:2], self._room, part.shape[3], dtype=dtype) for part in new)
        if (before := self._kv.get(layer_id)) is not None:
            for part, old in zip((keys, values), before, strict=True):
                part[:, :, :start] = old[:, :, :start]
        elif start:
            self._layers[layer_id].read_into(keys[:, :, :start], values[:, :, :start], tables())
        self._kv[layer_id] = keys, values
        return keys, values

    def rows(self, layer_id: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a copy of a layer's first tokens, or None where nothing of the layer is here."""
        if layer_id not in self._kv:
            return None
        keys, values = (part[:, :, :num_tokens].clone() for part in self._kv[layer_id])
        return keys, values

    def write(self, slots: RowSlots) -> None:
        """Write every layer's tokens [slots.start, slots.end) into blocks."""
        for layer_id, (keys, values) in self._kv.items():
            span = slice(slots.start, slots.end)
            self._layers[layer_id].write(keys[:, :, span], values[:, :, span], slots.slot_mapping)

    def drop(self) -> None:
        """Forget all rows, and give their memory back."""
        self._kv = {}
        self._memory.resize(self._num_bytes, 0)
        self._room = self._num_bytes = 0
