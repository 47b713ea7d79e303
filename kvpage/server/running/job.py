"""Job: the work that one HTTP request asks of the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpage.serving import SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts with their parameters, and the fields that they share.

    Attributes:
        prompts: Token ids of each prompt.
        params: One for each prompt.
        namespace: Where cached blocks are searched and kept.
        priority: Requests with a lower one are scheduled first.
        timeout: Seconds; None for no deadline.
        pin_ttl: Seconds for which the prompts stay pinned afterwards; None for not at all.
        tenant: Who asks, to whom the pins are counted.
        cache_at: Positions of each prompt at which other prompts may go on.
        compiled: The CompiledGuide of the answers, which is held until they are queued; None for any form.
    """

    prompts: list[list[int]]
    params: list[SamplingParams]
    namespace: bytes = b""
    priority: int = 0
    timeout: float | None = None
    pin_ttl: float | None = None
    tenant: str = ""
    cache_at: Sequence[int] = ()
    compiled: object = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of AsyncEngine.submit that all prompts share."""
        return {
            "namespace": self.namespace,
            "priority": self.priority,
            "timeout": self.timeout,
            "cache_at": self.cache_at,
        }
