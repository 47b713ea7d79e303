"""How far the chunks and the states of a store reach into a prompt, and why not further.

A store knows chunks by the hashes of all tokens before their ends. So it cannot tell which token differs from those of
another prompt, nor what other namespaces have.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvpage.blocks.explain import Ending, Explanation, GroupReach
from kvpage.store.stack.chunk_threads import num_leading


def explain_chunks(there: Sequence[bool], chunk_size: int, num_tokens: int) -> GroupReach:
    """Return how far chunks reach.

    Args:
        there: Whether each chunk of the prompt is there.
        chunk_size: Tokens of a chunk.
        num_tokens: Tokens of the prompt.
    """
    num_whole = num_leading(there)
    reach = GroupReach("attention", min(num_whole * chunk_size, num_tokens), Ending.NOT_CACHED)
    if num_whole == len(there):
        return replace(reach, ending=Ending.PROMPT)
    if True in there[num_whole:]:
        return replace(reach, ending=Ending.GAP, above=there.index(True, num_whole) * chunk_size)
    return reach


def explain_states(num_tokens: int, usable: int, positions: Sequence[int], chunks: GroupReach | None) -> Explanation:
    """Return how much of a prompt can be loaded, and why not more.

    Args:
        num_tokens: Tokens of the prompt.
        usable: The longest position that can be loaded.
        positions: Those of all states.
        chunks: How far chunks reach; None for a model without K and V.
    """
    above = min((one for one in positions if one > usable), default=None)
    state = GroupReach("state", usable, _ending(usable, num_tokens - 1, above), below=usable or None, above=above)
    if chunks is None:
        return Explanation(num_tokens, usable, (state,))
    if usable > chunks.num_tokens:  # by the shorter chunk before the state
        chunks = replace(chunks, num_tokens=usable, ending=Ending.PROMPT if usable == num_tokens else chunks.ending)
    return Explanation(num_tokens, usable, (chunks, state))


def _ending(usable: int, most: int, above: int | None) -> Ending:
    if usable >= most:
        return Ending.PROMPT
    return Ending.NO_CHECKPOINT if above is None or above > most else Ending.NO_KV
