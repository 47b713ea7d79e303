"""TenantPins: the prompts that hints pin, each tenant's within a quota of its own."""

from collections.abc import Sequence
from typing import Any


class TenantPins:
    """Pins by the tenants that asked for them. All calls are for the engine's thread.

    quota: Blocks that the pins of one tenant hold at most. None means all that the engine's own quota allows.
    """

    def __init__(self, quota: int | None) -> None:
        self._quota = quota
        self._pins: list[tuple[str, int]] = []  # tenant and handle; each holds a block or more

    def pin(self, engine: Any, tokens: Sequence[int], namespace: bytes, ttl: float, tenant: str) -> None:
        """Pin a prompt for `ttl` seconds. ValueError beyond a quota: nothing of it is pinned then."""
        space = engine.manager.space
        handle = space.pin(tokens, namespace, ttl)
        num_blocks = space.pins.num_blocks_of(handle)
        live_pins, num_pinned = list[tuple[str, int]](), 0
        for owner, pin in self._pins:
            if num_held := space.pins.num_blocks_of(pin):
                live_pins.append((owner, pin))
                num_pinned += num_held if owner == tenant else 0
        self._pins = live_pins
        if self._quota is not None and num_pinned + num_blocks > self._quota:
            space.unpin(handle)
            raise ValueError(
                f"pins of a tenant must hold at most {self._quota} blocks, got {num_pinned} + {num_blocks}"
            )
        if num_blocks:
            self._pins.append((tenant, handle))
        else:
            space.unpin(handle)  # nothing of it is cached
