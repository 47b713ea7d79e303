"""Explainer: tells callers how far the cache reaches into their prompts, and nothing of what others have.

tokens, namespace ─► AsyncEngine.explain, a few at once between two steps ─► Explanation ─► plain values for JSON

Questions come on in their order. While a store is asked, which has a thread for that, the next ones go on: one that
hangs makes each of them late, and none later. Requests wait for no store that is asked, and for a few calls a step.

Left out is all that is of no concern to a caller: other namespaces, the names of versions, and the words of a store
that has failed, which may name its address.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from kvpage.blocks.explain import Explanation, GroupReach
from kvpage.server.protocol.errors import REFUSED, ApiError, as_api_error
from kvpage.server.text.vocabulary import Vocabulary
from kvpage.serving import AsyncEngine

Fields = dict[str, Any]
AT_ONCE = 8
"""Questions that the stepping thread looks at between two steps at most, each for some tens of microseconds."""
NO_BLOCKS = "the cached blocks are in workers elsewhere, which are not asked"


class Explainer:
    """Explains prompts. For the thread of the event loop.

    Args:
        engine: The engine.
        vocabulary: The texts of tokens.
        has_blocks: Whether the cached blocks are in this process.
    """

    def __init__(self, engine: AsyncEngine, vocabulary: Vocabulary, has_blocks: bool) -> None:
        self._engine, self._vocabulary, self._has_blocks = engine, vocabulary, has_blocks
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def explain(self, tokens: Sequence[int], namespace: bytes, adapter: str | None) -> Fields:
        """Return how far the cache reaches into a prompt, and why not further.

        Args:
            tokens: The prompt.
            namespace: The caller's.
            adapter: The adapter that would compute the answer; None for none.

        Raises:
            ApiError: 404 where the blocks are elsewhere; as of a request for tokens that none may have.
        """
        if not self._has_blocks:
            raise ApiError(404, NO_BLOCKS, code="not_served")
        try:
            explanation = await self._engine.explain(tokens, namespace, adapter, searched="own", turns=self._turns)
        except REFUSED as error:
            raise as_api_error(error) from error
        return plain(explanation, self._vocabulary)


def plain(explanation: Explanation, vocabulary: Vocabulary) -> Fields:
    """Return an explanation as plain values, without what is of no concern to a caller.

    Args:
        explanation: Of the caller's own prompt.
        vocabulary: The texts of tokens.
    """
    store, version = explanation.store, explanation.version
    shown = replace(
        explanation, elsewhere=None, version=None, store=None if store is None else replace(store, error=None)
    )
    num_other = None if version is None else version[1]
    lines = [str(shown)]
    if num_other is not None:
        lines.append(f"  the weights have changed: other ones have {num_other} tokens")
    return {
        "object": "explanation",
        "num_tokens": explanation.num_tokens,
        "num_cached_tokens": explanation.num_cached_tokens,
        "groups": [_group(group, vocabulary) for group in explanation.groups],
        "store": None
        if store is None
        else {
            "num_tokens": store.num_tokens,
            "verdict": store.verdict.name.lower(),
            "reason": str(store.verdict),
            "groups": [_group(group, vocabulary) for group in store.groups],
        },
        "num_tokens_of_other_weights": num_other,
        "edits": [asdict(edit) for edit in explanation.edits],
        "text": "\n".join(lines),
    }


def _group(group: GroupReach, vocabulary: Vocabulary) -> Fields:
    texts = {
        f"{name}_text": None if token is None else vocabulary[token][0]
        for name, token in (("token", group.token), ("cached_token", group.cached_token))
    }
    ending = {"ending": group.ending.name.lower(), "reason": str(group.ending)}
    return {**asdict(group), **ending, **texts}
