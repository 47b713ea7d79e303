"""The prompts of a call, as its caller gives them."""

from collections.abc import Sequence

from kvpage.checks.tokens import Tokens
from kvpage.checks.values import as_list
from kvpage.serving.params.sampling import is_int


def as_prompts(prompts: Sequence[Tokens]) -> list[Tokens]:
    """The same as a list. TypeError for one text, and for the token ids of one prompt."""
    if isinstance(prompts, str | bytes):
        raise TypeError("prompts must be several, each of token ids, got one text: give [tokenizer(text)['input_ids']]")
    each = as_list("prompts", prompts)
    if each and is_int(each[0]):
        raise TypeError("prompts must be several, each of token ids, got the ids of one: put them into a list")
    return each
