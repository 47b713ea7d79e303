"""How far the chunks and the states of a store reach into a prompt, and why not further."""

from collections.abc import Sequence

from kvpage.blocks.explain import Ending, Explanation, GroupReach


def explain_chunks(num_found: int, num_tokens: int) -> GroupReach:
    """Return how far chunks reach.

    Args:
        num_found: Leading tokens whose chunks are there.
        num_tokens: Tokens of the prompt.
    """
    return GroupReach("attention", num_found, Ending.PROMPT if num_found == num_tokens else Ending.NOT_CACHED)


def explain_states(num_tokens: int, usable: int, positions: Sequence[int], num_chunk_tokens: int | None) -> Explanation:
    """Return how much of a prompt can be loaded, and why not more.

    Args:
        num_tokens: Tokens of the prompt.
        usable: The longest position that can be loaded.
        positions: Those of all states.
        num_chunk_tokens: Leading tokens whose chunks are there; None for a model without K and V.
    """
    above = min((one for one in positions if one > usable), default=None)
    state = GroupReach("state", usable, _ending(usable, num_tokens - 1, above), below=usable or None, above=above)
    if num_chunk_tokens is None:
        return Explanation(num_tokens, usable, (state,))
    return Explanation(num_tokens, usable, (explain_chunks(max(num_chunk_tokens, usable), num_tokens), state))


def _ending(usable: int, most: int, above: int | None) -> Ending:
    if usable >= most:
        return Ending.PROMPT
    return Ending.NO_CHECKPOINT if above is None or above > most else Ending.NO_KV
