"""Telemetry: reports of a serving loop besides its counters: events for routers, and how long blocks stay."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvpage._C import PrefixTree
from kvpage.observe.events import EventConfig
from kvpage.observe.events.config import SpecKind
from kvpage.observe.residency import BlockResidency, ResidencyStats
from kvpage.observe.tree_watch import TreeChanges, TreeWatch

if TYPE_CHECKING:
    from kvpage.observe.events.stream import EventStream

__all__ = ["Telemetry"]


class Telemetry:
    """Follows a tree and reports its changes after each step. Without events and sampling it does nothing.

    Args:
        tree: The tree to follow.
        events: Where events are published; None for none.
        residency_sample_rate: The part of the blocks, 0 to 1, whose times are taken.
        spec_kind: Sent with the events: "full_attention" where blocks have the K and V of heads, "mla_attention" where
            they have latents.

    Raises:
        ModuleNotFoundError: Events need the extra `events`, which is not installed.
        zmq.ZMQError: An endpoint cannot be bound.
        ValueError: The sample rate is out of range.
    """

    def __init__(
        self,
        tree: PrefixTree,
        events: EventConfig | None,
        residency_sample_rate: float,
        spec_kind: SpecKind = "full_attention",
    ) -> None:
        self._tree = tree
        self._watch: TreeWatch | None = None
        self._stream: EventStream | None = None
        residency = BlockResidency(residency_sample_rate)
        self._residency = residency if residency_sample_rate > 0 else None
        if events is None and self._residency is None:
            return
        self._watch = TreeWatch(tree)
        if self._residency is not None:
            self._watch.listeners.append(self._residency.tell)
        if events is not None:
            self._stream = _open_stream(self._watch, tree.block_size, events, spec_kind)
        self.tell()

    def follow(self, listener: Callable[[TreeChanges], object]) -> None:
        """Report changes to one more listener, from the next step on. Its first report is a restart: all blocks.

        Args:
            listener: Called by the engine's thread, after each step.
        """
        if self._watch is None:
            self._watch = TreeWatch(self._tree)
        self._watch.listeners.append(listener)
        self._watch.restart()

    def tell(self) -> None:
        """Report the changes since the last call. The serving loop calls it after each step."""
        if self._watch is not None:
            self._watch.poll()

    def close(self) -> None:
        """Report the last changes, and end. A second call does nothing; the counters stay."""
        if self._watch is None:
            return
        self.tell()
        if self._stream is not None:
            self._stream.close()
        self._watch.close()
        self._watch = None

    def residency(self) -> dict[str, ResidencyStats] | None:
        """Return the times of blocks by tier, or None without sampling."""
        return self._residency.stats() if self._residency else None

    @property
    def num_lost_events(self) -> int | None:
        """Number of event batches that were dropped; None without events."""
        return self._stream.publisher.num_lost if self._stream else None

    @property
    def event_endpoints(self) -> tuple[str, str | None] | None:
        """Endpoint of the events and of the replay of past ones, with the ports taken; None without events."""
        return (self._stream.publisher.endpoint, self._stream.publisher.replay_endpoint) if self._stream else None


def _open_stream(watch: TreeWatch, block_size: int, config: EventConfig, spec_kind: SpecKind) -> "EventStream":
    try:
        from kvpage.observe.events.stream import EventStream
    except ModuleNotFoundError as error:
        if error.name not in ("zmq", "msgpack"):
            raise
        message = "events need the extra 'events': pip install 'kvpage[events]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    return EventStream(watch, block_size, config, spec_kind)
