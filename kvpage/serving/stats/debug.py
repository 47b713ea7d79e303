"""EngineDebug: the parts of an engine by the names of their roles, for tests and for a look into a running engine."""

from collections.abc import Callable
from dataclasses import dataclass

from kvpage.serving.blending.connector import BlendConnector
from kvpage.serving.loop.batch.batch_runner import BatchRunner
from kvpage.serving.loop.batch.device_decoder import DeviceDecoder
from kvpage.serving.loop.connectors import Connectors
from kvpage.serving.loop.graphs.capture import Capturer
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.loop.store_connector import StoreConnector
from kvpage.serving.model.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class EngineDebug:
    """The parts of an engine. No release promises that they stay as they are.

    The parts are the engine's own: a change of a part is a change of the engine. The manager, the scheduler, the cache
    and the loop are attributes of the engine itself.

    Attributes:
        runner: Runs the model's own code.
        connectors: The store and the kept segments, as the loop asks them.
        transfers: The block moves of the steps.
        batch_runner: Computes a batch.
        decoder: Begins decode steps ahead; None where the engine waits for each step's tokens.
        use_graphs: Captures decode steps from now on, by a capturer.
        accept_weights: Takes the model's weights as they are now, and forgets nothing that others have computed.
    """

    runner: ModelRunner
    connectors: Connectors
    transfers: BlockTransfers
    batch_runner: BatchRunner
    decoder: DeviceDecoder | None
    use_graphs: Callable[[Capturer], None]
    accept_weights: Callable[[], None]

    @property
    def store(self) -> StoreConnector:
        """The connector between the loop and the engine's store.

        Raises:
            ValueError: The engine has no store.
        """
        if self.connectors.store is None:
            raise ValueError("store must be given to the engine, there is none")
        return self.connectors.store

    @property
    def blend(self) -> BlendConnector:
        """The connector between the loop and the kept segments.

        Raises:
            ValueError: The engine does not blend.
        """
        if self.connectors.blend is None:
            raise ValueError("blend must be in the engine's config, there is none")
        return self.connectors.blend
