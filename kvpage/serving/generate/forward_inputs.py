"""ForwardInputs: the arguments of a model's forward that decide over K and V. Forward: one that is under way."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from kvpage.checks.tensors import as_numbers
from kvpage.checks.tokens import as_array
from kvpage.serving.generate.cached_rows import TokenRows
from kvpage.serving.generate.row_slots import RowSlots
from kvpage.serving.generate.states.row_states import PackedPass, RowPass
from kvpage.serving.model.hf_cache.argument import KV_ARGUMENTS

# K and V of a token follow from these alone. Any other tensor (images, embeddings, token types) decides over them too,
# and cannot be read off the tokens.
TEXT_INPUTS = frozenset(
    ("input_ids", "attention_mask", "position_ids", "cache_position", *KV_ARGUMENTS, "labels", "logits_to_keep")
)


class ForwardInputs(NamedTuple):
    """The new tokens of one forward.

    tokens: int32 [num_rows, at least 1]. start: the place of the first in each row.
    is_whole: for each row, whether the model sees all of its tokens, each at its place. Only then do its K and V follow
        from its tokens alone.
    """

    tokens: TokenRows
    start: int
    is_whole: list[bool]

    @classmethod
    def of_call(cls, arguments: Mapping[str, Any], length: int) -> "ForwardInputs":
        """Read the named arguments of a forward, where `length` tokens are in the cache.

        The new tokens follow those, unless their positions begin at 0: assisted generation first computes the whole
        prompt, whatever the cache holds. Raises ValueError for more than text, for no input_ids, for use_cache=False.
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
        for numbers in positions:
            in_place = _are_in_place(numbers, start, tokens.shape)
            is_whole = [whole and right for whole, right in zip(is_whole, in_place, strict=True)]
        return cls(tokens, start, is_whole)


@dataclass(slots=True)
class Forward:
    """A forward that is under way, over the rows' tokens [start, end).

    slots: the blocks' slots for the tokens; None where they go to the working rows.
    layers_left: the layers that have not written yet.
    repeats: the number of rows that were made of each.
    call: torch's frame, which ends with the forward.
    states: those of the rows; None for a model without any.
    """

    tokens: TokenRows
    start: int
    end: int
    slots: RowSlots | None
    layers_left: set[int]
    repeats: int
    call: FrameType
    states: RowPass | PackedPass | None

    @property
    def is_done(self) -> bool:
        """Whether every layer has written its K and V, and its states."""
        return not self.layers_left and (self.states is None or self.states.is_done())


def as_token_rows(input_ids: Any) -> TokenRows:
    """Return token ids as int32 [num_rows, num_tokens], both at least 1. ValueError for anything else."""
    is_tensor = isinstance(input_ids, torch.Tensor)
    array = as_array(as_numbers("input_ids", input_ids).detach().cpu() if is_tensor else input_ids, "input_ids")
    if array.ndim != 2 or array.size == 0 or array.dtype.kind not in "iu":
        raise ValueError(f"input_ids must be integers [num_rows, num_tokens], got {array.dtype} {array.shape}")
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise ValueError(f"input_ids must be ids of a vocabulary, got {int(array.min())} to {int(array.max())}")
    return array.astype(np.int32)


def is_unmasked(attention_mask: Any, num_rows: int, num_tokens: int) -> list[bool]:
    """Return, for each row, whether the mask shows all of its tokens.

    None shows everything. A mask of another form than [num_rows, num_tokens] may hide anything.
    """
    if attention_mask is None:
        return [True] * num_rows
    if not isinstance(attention_mask, torch.Tensor) or tuple(attention_mask.shape) != (num_rows, num_tokens):
        return [False] * num_rows
    shown: list[bool] = as_numbers("attention_mask", attention_mask).bool().all(dim=1).tolist()
    return shown


def as_mask_tensor(attention_mask: Any) -> torch.Tensor:
    """Return a mask, given as a tensor or lists of numbers, as a tensor. ValueError or TypeError for others."""
    try:
        return as_numbers("attention_mask", torch.as_tensor(attention_mask))
    except RuntimeError as error:  # torch cannot read it
        raise ValueError(f"attention_mask must be numbers, got {type(attention_mask).__name__}") from error


def _are_in_place(positions: Any, start: int, shape: tuple[int, ...]) -> list[bool]:
    """Return, for each row, whether its tokens have the positions from `start` on. None leaves them to the model."""
    num_rows, num_tokens = shape
    if positions is None:
        return [True] * num_rows
    positions = as_numbers("position_ids", positions)
    if positions.dim() == 1:
        positions = positions.unsqueeze(0)
    if positions.dim() != 2 or positions.shape[0] not in (1, num_rows) or positions.shape[1] != num_tokens:
        return [False] * num_rows
    if num_tokens == 1:  # each step of a decode: one read from the device
        return [position == [start] for position in positions.expand(num_rows, 1).tolist()]
    expected = torch.arange(start, start + num_tokens, device=positions.device)
    in_place: list[bool] = (positions == expected).all(dim=1).expand(num_rows).tolist()
    return in_place


def _is_data(value: Any) -> bool:
    """Whether it contains a tensor or a list of numbers. Models also pass empty containers."""
    if isinstance(value, Mapping):
        return _is_data(list(value.values()))
    if isinstance(value, (list, tuple)):
        return any(_is_data(element) or isinstance(element, (int, float)) for element in value)
    return isinstance(value, (torch.Tensor, np.ndarray))
