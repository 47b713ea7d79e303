"""EventStream: publishes the changes that a tree's watch reports."""

from kvpage.observe.events.block_events import BlockEvents
from kvpage.observe.events.config import EventConfig, SpecKind
from kvpage.observe.events.publisher import EventPublisher
from kvpage.observe.tree_watch import TreeChanges, TreeWatch


class EventStream:
    """Publishes one batch for each poll of the watch that has changes.

    Subscribers stay consistent over losses. Where the tree's log or a batch was lost, the next batch says
    AllBlocksCleared and stores everything again.
    """

    def __init__(
        self, watch: TreeWatch, block_size: int, config: EventConfig, spec_kind: SpecKind = "full_attention"
    ) -> None:
        self.publisher = EventPublisher(config)
        self._watch = watch
        self._events = BlockEvents(block_size, config.lora_names, spec_kind)
        watch.listeners.append(self._tell)

    def close(self) -> None:
        """Publish nothing from now on, and send the waiting batches."""
        self._watch.listeners.remove(self._tell)
        self.publisher.close()

    def _tell(self, changes: TreeChanges) -> None:
        events = self._events.events(changes)
        if events and not self.publisher.publish(events):
            self._watch.restart()
