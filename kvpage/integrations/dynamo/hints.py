"""CacheHints: the envelope of hints that Dynamo's router adds to a request, as far as it is about cached blocks.

    kv_hint ─► KvHints of the server ─► CacheHints ─► priority of the prompt's blocks, and a pin after the answer

Hints are no commands: one that cannot be read or followed is logged, and the request is served.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpage.serving import Engine
from kvpage.serving.params.sampling import MAX_RETAIN_PRIORITY

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheHints:
    """How long the blocks of a prompt are to be kept.

    Attributes:
        retain_priority: As SamplingParams.retain_priority: blocks with a higher one are evicted later.
        pin_ttl: Seconds for which it stays pinned after the answer; None for not at all.
    """

    retain_priority: int = 0
    pin_ttl: float | None = None


NO_HINTS = CacheHints()


def read_hints(envelope: Any) -> CacheHints:
    """Read an envelope.

    Args:
        envelope: Dynamo's `kv_hint`; None for none. Actions that are not known are left aside, as the router's
            `kv.fetch` is, which it sends only to workers that say they take it.

    Returns:
        The hints. An envelope that cannot be read has none.
    """
    if not isinstance(envelope, Mapping) or not envelope:
        return NO_HINTS
    from kvpage.server.config import MAX_HINTED_PRIORITY
    from kvpage.server.protocol.errors import ApiError
    from kvpage.server.protocol.kv_hints import KvHints
    from kvpage.server.protocol.request_model import read_model

    try:
        hints = read_model(KvHints, dict(envelope), "kv_hint")
        return CacheHints(-(-hints.retain_priority() * MAX_RETAIN_PRIORITY // MAX_HINTED_PRIORITY), hints.pin_ttl())
    except ApiError as error:
        logger.info("hints were not followed: %s", error)
        return NO_HINTS


def pin(engine: Engine, tokens: Sequence[int], namespace: bytes, ttl: float) -> None:
    """Pin a prompt, if the engine's quota allows it. For the engine's thread.

    Args:
        engine: The engine that has computed it.
        tokens: The prompt.
        namespace: Where it is cached.
        ttl: Seconds.
    """
    try:
        engine.manager.space.pin(tokens, engine.kv_namespace(namespace), ttl)
    except ValueError as error:
        logger.info("a hint to pin %d tokens was not followed: %s", len(tokens), error)
