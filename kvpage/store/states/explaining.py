"""How far the chunks and the states of a store reach into a prompt, and why not further."""

from kvpage.blocks.explain import Ending, Explanation, GroupReach
from kvpage.store.states.state_search import Array, StateSearch


def explain_chunks(num_found: int, num_tokens: int) -> GroupReach:
    """Return how far chunks reach.

    Args:
        num_found: Leading tokens whose chunks are there.
        num_tokens: Tokens of the prompt.
    """
    return GroupReach("attention", num_found, Ending.PROMPT if num_found == num_tokens else Ending.NOT_CACHED)


def explain_states(search: StateSearch, tokens: Array, namespace: bytes) -> Explanation:
    """Return how much of a prompt can be loaded, and why not more.

    Args:
        search: Of the prompt's positions.
        tokens: The prompt.
        namespace: Where to look.
    """
    most = len(tokens) - 1
    usable = search.longest(tokens, namespace, most)
    above = min((one for one in search.all_of(tokens, namespace) if one > usable), default=None)
    state = GroupReach("state", usable, _ending(usable, most, above), below=usable or None, above=above)
    if not search.has_chunks:
        return Explanation(len(tokens), usable, (state,))
    num_found = max(search.num_chunk_tokens(tokens, namespace), usable)
    return Explanation(len(tokens), usable, (explain_chunks(num_found, len(tokens)), state))


def _ending(usable: int, most: int, above: int | None) -> Ending:
    if usable >= most:
        return Ending.PROMPT
    return Ending.NO_CHECKPOINT if above is None or above > most else Ending.NO_KV
