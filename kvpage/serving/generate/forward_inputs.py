"""ForwardInputs: what a model's forward is called with, as far as it decides over K and V."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvpage.checks.tensors import as_numbers
from kvpage.checks.tokens import as_array
from kvpage.serving.generate.cached_rows import TokenRows

# K and V of a token follow from these and from the tokens. Whatever else is a tensor (images, embeddings, token types)
# decides over them too, and no token tells it.
TEXT_INPUTS = frozenset(
    ("input_ids", "attention_mask", "position_ids", "cache_position", "past_key_values", "labels", "logits_to_keep")
)


class ForwardInputs(NamedTuple):
    """tokens: the new ones, int32 [num_rows, at least 1]. start: the place of the first.

    is_whole: of each row, whether the model is to see all of its tokens, each at its place. Only then do its tokens
        alone tell its K and V.
    """

    tokens: TokenRows
    start: int
    is_whole: list[bool]

    @classmethod
    def of_call(cls, arguments: Mapping[str, Any], length: int) -> "ForwardInputs":
        """The inputs of a forward by their names, where `length` tokens are in the cache.

        They follow these, unless they have the positions from 0 on: assisted generation computes the whole prompt at
        first, whatever the cache holds. ValueError where there is more than text, no input_ids, or use_cache=False.
        """
        others = [name for name, value in arguments.items() if name not in TEXT_INPUTS and _is_data(value)]
        if others:
            raise ValueError(f"a cache of blocks takes text only, got {', '.join(sorted(others))}")
        if arguments.get("use_cache") is False:
            raise ValueError(
                "use_cache must be True with a cache of blocks, got False: generate would give all tokens to each "
                "forward, as the model's generation_config may ask; call generate(..., use_cache=True)"
            )
        tokens = as_token_rows(arguments.get("input_ids"))
        positions = [arguments.get(name) for name in ("position_ids", "cache_position")]
        start = 0 if any(x is not None and all(_are_in_place(x, 0, tokens.shape)) for x in positions) else length
        is_whole = is_unmasked(arguments.get("attention_mask"), len(tokens), start + tokens.shape[1])
        for given in positions:
            in_place = _are_in_place(given, start, tokens.shape)
            is_whole = [whole and right for whole, right in zip(is_whole, in_place, strict=True)]
        return cls(tokens, start, is_whole)


def named_arguments(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by their names, those of its **kwargs among them. Empty for a call that does not fit."""
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:  # the call itself will say so
        return {}
    named: dict[str, Any] = {}
    for name, value in bound.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


def as_token_rows(input_ids: Any) -> TokenRows:
    """Token ids as int32 [num_rows, num_tokens], both at least 1. ValueError for anything else."""
    is_tensor = isinstance(input_ids, torch.Tensor)
    array = as_array(as_numbers("input_ids", input_ids).detach().cpu() if is_tensor else input_ids, "input_ids")
    if array.ndim != 2 or array.size == 0 or array.dtype.kind not in "iu":
        raise ValueError(f"input_ids must be integers [num_rows, num_tokens], got {array.dtype} {array.shape}")
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise ValueError(f"input_ids must be ids of a vocabulary, got {int(array.min())} to {int(array.max())}")
    return array.astype(np.int32)


def is_unmasked(attention_mask: Any, num_rows: int, num_tokens: int) -> list[bool]:
    """Of each row, whether the mask shows all of its tokens. None shows everything; a mask of another form than
    [num_rows, num_tokens] may hide anything.
    """
    if attention_mask is None:
        return [True] * num_rows
    if not isinstance(attention_mask, torch.Tensor) or tuple(attention_mask.shape) != (num_rows, num_tokens):
        return [False] * num_rows
    return as_numbers("attention_mask", attention_mask).bool().all(dim=1).tolist()


def as_mask_tensor(attention_mask: Any) -> torch.Tensor:
    """A mask of tensors or lists of numbers. ValueError or TypeError for anything else."""
    try:
        return as_numbers("attention_mask", torch.as_tensor(attention_mask))
    except RuntimeError as error:  # torch's, of what it cannot read
        raise ValueError(f"attention_mask must be numbers, got {type(attention_mask).__name__}") from error


def _are_in_place(positions: Any, start: int, shape: tuple[int, ...]) -> list[bool]:
    """Of each row, whether its tokens have the positions from `start` on; None leaves them to the model."""
    num_rows, num_tokens = shape
    if positions is None:
        return [True] * num_rows
    positions = as_numbers("position_ids", positions)
    if positions.dim() == 1:
        positions = positions.unsqueeze(0)
    if positions.dim() != 2 or positions.shape[0] not in (1, num_rows) or positions.shape[1] != num_tokens:
        return [False] * num_rows
    if num_tokens == 1:  # of each step: one look at the device
        return [place == [start] for place in positions.expand(num_rows, 1).tolist()]
    expected = torch.arange(start, start + num_tokens, device=positions.device)
    return (positions == expected).all(dim=1).expand(num_rows).tolist()


def _is_data(value: Any) -> bool:
    """Whether there is a tensor in it, or a list of numbers. Models also pass containers of nothing on."""
    if isinstance(value, Mapping):
        return _is_data(list(value.values()))
    if isinstance(value, (list, tuple)):
        return any(_is_data(element) or isinstance(element, (int, float)) for element in value)
    return isinstance(value, (torch.Tensor, np.ndarray))
