"""EventStream: publishes what a tree's watch tells."""

from kvpage.observe.events.block_events import BlockEvents
from kvpage.observe.events.config import EventConfig
from kvpage.observe.events.publisher import EventPublisher
from kvpage.observe.tree_watch import TreeChanges, TreeWatch


class EventStream:
    """One batch for each poll of the watch that has something to tell.

    Subscribers stay consistent over losses: where the tree's log or a batch was lost, the next batch says
    AllBlocksCleared and stores everything again.
    """

    def __init__(self, watch: TreeWatch, block_size: int, config: EventConfig) -> None:
        self.publisher = EventPublisher(config)
        self._watch = watch
        self._events = BlockEvents(block_size, config.lora_names)
        watch.listeners.append(self._tell)

    def close(self) -> None:
        """Publishes nothing from now on; sends what waits."""
        self._watch.listeners.remove(self._tell)
        self.publisher.close()

    def _tell(self, changes: TreeChanges) -> None:
        events = self._events.events(changes)
        if events and not self.publisher.publish(events):
            self._watch.restart()
