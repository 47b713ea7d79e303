"""ExpectedBlocks: blocks that can be found already, and whose bytes are still on their way from a store.

load ─► verified ─► add(ids, arrival) ─► commit: requests find the blocks ─► the last byte is there ─► discard
                      │
    a step with such a block in a table: each of its layers waits for the arrival's      others wait for nothing
    a move of any block: the stream waits for all arrivals first
"""

import numpy as np

from kvpage.blocks.sequence_state import Ids
from kvpage.cache.layered_moves import Arrival
from kvpage.serving.model.step import StepArrival

__all__ = ["ExpectedBlocks"]


class ExpectedBlocks:
    """Arrivals under way, with their blocks. For the engine's thread."""

    def __init__(self) -> None:
        self._arrivals: list[tuple[Ids, Arrival]] = []

    def add(self, block_ids: Ids, arrival: Arrival) -> None:
        """Expect blocks, whose owner keeps them until it calls `discard`."""
        self._arrivals.append((block_ids, arrival))

    def discard(self, arrival: Arrival) -> None:
        """Expect the arrival's blocks no more: they are there. One that is not expected is left alone."""
        self._arrivals = [(ids, expected) for ids, expected in self._arrivals if expected is not arrival]

    def wait(self, block_tables: Ids | None = None) -> None:
        """Order the current stream's further work after the blocks of these tables; None for all blocks.

        Raises the error of their copies.
        """
        for arrival in self._of(block_tables) if self._arrivals else ():
            arrival.wait()

    def join(self, arrival: Arrival | None, block_tables: Ids) -> StepArrival | None:
        """Return what each layer of a step waits for: an arrival of its own, or None, and those of its tables' blocks.

        None says that there is nothing to wait for.
        """
        if not self._arrivals:
            return arrival
        joined = [*self._of(block_tables), *([] if arrival is None else [arrival])]
        return joined[0] if len(joined) == 1 else _Joined(joined) if joined else None

    def _of(self, block_tables: Ids | None) -> list[Arrival]:
        """Return the arrivals that the current stream has not waited for, as far as their blocks are in the tables."""
        return [
            arrival
            for ids, arrival in self._arrivals
            if not arrival.is_over and (block_tables is None or np.isin(ids, block_tables).any())
        ]


class _Joined:
    """Several arrivals as one."""

    def __init__(self, arrivals: list[Arrival]) -> None:
        self._arrivals = arrivals

    def wait_layer(self, layer: int) -> None:
        for arrival in self._arrivals:
            arrival.wait_layer(layer)
