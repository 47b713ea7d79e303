"""TieredStore: the life of a store, whatever its records are: tiers, calls under way, flush and close."""

import threading
from collections.abc import Sequence
from typing import TypeVar

import torch

from kvpage.checks.interrupts import uninterrupted
from kvpage.checks.values import check_flag
from kvpage.store.stack.call_gate import CallGate, gated
from kvpage.store.stack.placed import Placed
from kvpage.store.stack.tier_stack import TierStack

S = TypeVar("S", bound="TieredStore")


class TieredStore:
    """A store over tiers. Thread-safe; in a forked process every call but `close` raises RuntimeError.

    tiers: the fastest first; the store closes them. num_threads: for one call; 0 or None for torch's number. are_given:
    whether the tiers stay open where the store cannot be made, since its caller made them.

    Raises ValueError if there is no tier; RuntimeError if the threads cannot be started.
    """

    def __init__(self, tiers: Sequence[Placed], num_threads: int | None, are_given: bool) -> None:
        if not tiers:
            raise ValueError("tiers must be at least one, got none")
        try:
            self._tiers = TierStack(tiers, num_threads or torch.get_num_threads())
        except BaseException:
            for placed in () if are_given else tiers:
                placed.tier.close()
            raise
        self.gate = CallGate("the store")
        self._closing, self._is_closed = threading.RLock(), False

    @gated
    def clear(self) -> list[str]:
        """Remove all records, of every model, from every tier.

        Returns:
            The names of the tiers that keep their records: out of reach, or open for reading only.
        """
        return self._tiers.clear()

    @gated
    def flush(self, sync: bool = False) -> None:
        """Wait until everything in the background is written; with `sync`, until it would survive a loss of power."""
        check_flag("sync", sync)
        self._tiers.flush(sync)
        self._flush_parts()

    def refused(self) -> dict[str, int]:
        """Return the records that were there and were misses, by reason, as `stats` has them. No tier is asked."""
        return dict(self._tiers.refused)

    @uninterrupted
    def close(self) -> None:
        """Wait for calls and loads that are under way, flush, and close the tiers.

        Meanwhile and afterwards, every call but `stats` and `unpin` raises ValueError. A second call does nothing. In a
        forked process nothing happens: the tiers are the parent's.
        """
        self._check_closable()
        if self.gate.close():
            with self._closing:
                self._tiers.threads.drain()  # Ctrl-C may end it: then the next call closes the tiers
                if not self._is_closed:  # by another thread, or by a signal's handler meanwhile
                    self._is_closed = True
                    self._close_parts()
                    self._tiers.close()

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_closable(self) -> None:
        """Raise RuntimeError where closing would wait for the caller itself."""

    def _flush_parts(self) -> None:
        """Wait for other background work of the kind of store."""

    def _close_parts(self) -> None:
        """Close the parts of the kind of store besides its tiers."""
