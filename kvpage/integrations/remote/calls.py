"""GenerateCall: a request as it goes to a worker; Workers: who takes it."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpage.serving.loop.outputs import StepOutput
from kvpage.serving.params.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A request for one worker.

    Attributes:
        request_id: An id that no other call has.
        tokens: int32 [num_tokens], the prompt.
        params: With nothing left at its default, and a seed: the same call gives the same tokens again.
        namespace: Only requests of the same namespace share cached blocks.
        priority: Requests with a lower one are scheduled first.
        cache_at: Positions of the prompt at which other prompts may go on; see Engine.add_request.
        is_arriving: Whether another worker computes the prompt meanwhile, and stores its chunks.
    """

    request_id: str
    tokens: npt.NDArray[np.int32]
    params: SamplingParams
    namespace: bytes = b""
    priority: int = 0
    is_arriving: bool = False
    cache_at: tuple[int, ...] = ()


class WorkerLost(RuntimeError):
    """A worker has gone, or takes no more: another one can do the call."""


class Workers(Protocol):
    """Workers of one kind, of which each call gets one."""

    def stream(self, call: GenerateCall) -> AsyncGenerator[list[StepOutput], None]:
        """Run a call on one of them. Closing the generator aborts it.

        Args:
            call: The request.

        Yields:
            All outputs that have come since the last ones. The last one has the outcome.

        Raises:
            WorkerLost: The worker has gone.
            ValueError, TypeError: The worker refuses the call, and so will others.
        """
        ...
