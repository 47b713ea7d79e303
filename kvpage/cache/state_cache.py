"""StateCache: owns the state slots of the device tier and the host tier, and copies slots within and between them.

    slot 0   | layer 0 conv | layer 0 recurrent | layer 1 conv | ...        one run of bytes
    slot 1   | ...

A copy of a slot is one extent for all layers. It knows slot numbers, and nothing of the sequences that own them.
"""

from collections.abc import Callable, Mapping

import torch

from kvpage.blocks.moves import BlockMove
from kvpage.cache.calibration import Calibration
from kvpage.checks.tensors import parse_device
from kvpage.checks.values import check_at_least
from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.groups import StateLayout, StatePart
from kvpage.ops.copies import BlockCopier

StateKey = tuple[int, str, int]
"""Layer, name and index of a part."""


class StateCache:
    """The state slots of one rank, zeroed.

    Each copy is ordered on the current stream of a GPU, and the host does not wait. It raises as `BlockCopier.run`
    does, before anything is written.

    Attributes:
        layout: The place of each part in a slot.
        num_slots: Slots of the device tier.
        num_host_slots: Slots of the host tier.
        slots: uint8 [num_slots, slot_bytes], the device tier. The cache owns it.
        host_slots: uint8 [num_host_slots, slot_bytes], the host tier; pinned beside a GPU.
        views: For each part, by its key, the view [num_slots, *shape] of the device tier.

    Args:
        layout: The place of each part.
        num_slots: Slots of the device tier, 0 or more.
        num_host_slots: Slots of the host tier, 0 or more.
        device: The device of the device tier.
        calibration: When a GPU's kernel copies to and from the host; by default its copy engines do.

    Raises:
        TypeError: `layout` is no StateLayout, or `calibration` no Calibration.
        ValueError: A number is negative, or the device is neither a CPU nor a CUDA device.
        OSError: The system has too little memory for the host tier, or cannot pin it.
    """

    def __init__(
        self,
        layout: StateLayout,
        num_slots: int,
        num_host_slots: int = 0,
        device: torch.device | str = "cpu",
        *,
        calibration: Calibration | None = None,
    ) -> None:
        if not isinstance(layout, StateLayout):
            raise TypeError(f"layout must be a StateLayout, got {type(layout).__name__}")
        if calibration is not None and not isinstance(calibration, Calibration):
            raise TypeError(f"calibration must be a Calibration, got {type(calibration).__name__}")
        check_at_least("num_slots", num_slots, 0)
        check_at_least("num_host_slots", num_host_slots, 0)
        device = parse_device("device", device)
        self.layout, self.num_slots, self.num_host_slots = layout, num_slots, num_host_slots
        bytes_of_slots = _bytes_layout(layout.slot_bytes)
        (of_device,) = bytes_of_slots.allocate(num_slots, 1, device)
        (of_host,) = bytes_of_slots.allocate(num_host_slots, 1, torch.device("cpu"), device.type == "cuda")
        self.slots, self.host_slots = of_device.squeeze(1), of_host.squeeze(1)
        self.views: Mapping[StateKey, torch.Tensor] = {
            part.key: _view(self.slots, offset, part) for part, offset in zip(layout.parts, layout.offsets, strict=True)
        }
        limits = (calibration.max_bytes_in, calibration.max_bytes_out) if calibration else (0, 0)
        self._swap_in = BlockCopier([of_host], [of_device], bytes_of_slots, limits[0])
        self._swap_out = BlockCopier([of_device], [of_host], bytes_of_slots, limits[1])
        self._copy = BlockCopier([of_device], [of_device], bytes_of_slots)

    @property
    def device(self) -> torch.device:
        """The device of the device tier."""
        return self.slots.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots of the device tier."""
        return self.num_slots * self.layout.slot_bytes

    @property
    def num_host_bytes(self) -> int:
        """Bytes of all slots of the host tier."""
        return self.num_host_slots * self.layout.slot_bytes

    def part(self, part: StatePart) -> torch.Tensor:
        """Return the view [num_slots, *shape] of a part in the device tier.

        Args:
            part: One of the layout.

        Raises:
            TypeError: It is no StatePart.
            ValueError: The layout has no such part.
        """
        if not isinstance(part, StatePart):
            raise TypeError(f"part must be a StatePart, got {type(part).__name__}")
        view = self.views.get(part.key)
        if view is None or view.shape[1:] != part.shape or view.dtype != part.dtype:
            raise ValueError(f"part must be of the layout, got {part.spec}")
        return view

    def copy(self, pairs: torch.Tensor) -> None:
        """Copy device slots to device slots.

        Args:
            pairs: int64 [num_pairs, 2] on the CPU, (from, to).

        Raises:
            TypeError: It is no tensor.
            ValueError: A slot is out of range, a destination is named twice, or pairs depend on each other.
        """
        self._copy.run(pairs)

    def swap_out(self, pairs: torch.Tensor) -> None:
        """Copy device slots to host slots.

        Args:
            pairs: int64 [num_pairs, 2] on the CPU, (device slot, host slot).

        Raises:
            TypeError: It is no tensor.
            ValueError: A slot is out of range, or a destination is named twice.
        """
        self._swap_out.run(pairs)

    def swap_in(self, pairs: torch.Tensor) -> None:
        """Copy host slots to device slots.

        Args:
            pairs: int64 [num_pairs, 2] on the CPU, (host slot, device slot).

        Raises:
            TypeError: It is no tensor.
            ValueError: A slot is out of range, or a destination is named twice.
        """
        self._swap_in.run(pairs)

    def do_move(self, move: BlockMove) -> None:
        """Make one move of slots.

        Args:
            move: Its pairs are slots.

        Raises:
            ValueError: There is no such kind, or as of `copy`, `swap_out` and `swap_in`.
            TypeError: The pairs are no array of numpy.
        """
        do: dict[str, Callable[[torch.Tensor], None]] = {
            "copy": self.copy,
            "swap_out": self.swap_out,
            "swap_in": self.swap_in,
        }
        if move.kind not in do:
            raise ValueError(f"kind must be 'copy', 'swap_out' or 'swap_in', got {move.kind!r}")
        do[move.kind](torch.from_numpy(move.pairs))


def _bytes_layout(slot_bytes: int) -> CacheLayout:
    """Return the layout of slots as blocks of one row of bytes: [num_slots, 1, slot_bytes]."""
    return CacheLayout(1, 1, slot_bytes, torch.uint8, backend="mla")


def _view(slots: torch.Tensor, offset: int, part: StatePart) -> torch.Tensor:
    rows = slots[:, offset : offset + part.num_bytes].view(part.dtype)
    return rows.view(len(slots), *part.shape)
