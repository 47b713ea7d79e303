"""The padding at the beginning of rows, which a view with `same_bits` neither computes nor attends to.

mask        0 0 1 1 1 | 1        two pads
positions   . . 0 1 2 | 3
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvpage.checks.tensors import as_numbers


def pads_of_mask(attention_mask: torch.Tensor | None, num_rows: int) -> list[int]:
    """Return the number of pads of each row by a mask [num_rows, num_tokens]; None shows all tokens.

    ValueError for a mask that hides others than the first tokens of a row, or all of them.
    """
    if attention_mask is None:
        return [0] * num_rows
    mask = as_numbers("attention_mask", attention_mask)
    if mask.dim() != 2 or len(mask) != num_rows:
        raise ValueError(f"attention_mask must be [{num_rows}, num_tokens] with same_bits, got {tuple(mask.shape)}")
    counts = mask.shape[1] - mask.bool().sum(1)
    if bool((counts == mask.shape[1]).any()) or not torch.equal(mask.bool(), _shown(counts, mask.shape[1])):
        raise ValueError("attention_mask must show the last tokens of each row, and hide those before alone")
    pads: list[int] = counts.tolist()
    return pads


def pads_of_forward(
    arguments: Mapping[str, Any], known: Sequence[int] | None, num_rows: int, start: int, end: int
) -> list[int] | None:
    """Return the padding of each row of a forward that computes the tokens [start, end). ValueError for other places.

    arguments: of the forward. known: the padding of the rows so far, each of which it may repeat; empty without rows,
    and None where padding is computed: then the result is None, too.
    """
    if known is None:
        return None
    if known:
        pads = [num_pads for num_pads in known for _ in range(num_rows // len(known))]
    else:
        pads = pads_of_mask(arguments.get("attention_mask"), num_rows)
    if len(pads) == num_rows:  # another number is refused elsewhere
        check_places(arguments, pads, start, end)
    return pads


def are_findable(is_whole: list[bool], pads: Sequence[int] | None) -> list[bool]:
    """Return for each row whether others find it. pads: of rows whose padding is not computed; None for others."""
    return is_whole if pads is None else [True] * len(pads)


def check_places(arguments: Mapping[str, Any], pads: Sequence[int], start: int, end: int) -> None:
    """Raise ValueError unless mask and positions of a forward are those of rows with these pads.

    arguments: of the forward, which computes the tokens [start, end) of each row. A mask may not reach the tokens that
    are no padding yet.
    """
    counts, mask = torch.tensor(pads), arguments.get("attention_mask")
    if mask is None:
        is_right = not any(pads)
    else:
        shown = _shown(counts, end)
        is_right = mask.shape == shown.shape and torch.equal(as_numbers("attention_mask", mask).bool(), shown)
    if not is_right:
        raise ValueError(
            f"attention_mask must be that which the cache was made with, and then show all tokens, up to token {end}"
        )
    expected = torch.arange(start, end) - counts[:, None]
    positions = arguments.get("position_ids")
    if positions is not None and not _agree(positions, expected):
        raise ValueError("position_ids must count the tokens after the padding of each row, with same_bits")
    places = arguments.get("cache_position")
    if places is not None and not torch.equal(as_numbers("cache_position", places), torch.arange(start, end)):
        raise ValueError(f"cache_position must be that of tokens {start} to {end}, with same_bits")


def _shown(counts: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the mask [num_rows, num_tokens] of rows with these numbers of pads."""
    return torch.arange(num_tokens) >= counts[:, None]


def _agree(positions: Any, expected: torch.Tensor) -> bool:
    """Whether the tokens that are no padding have the expected positions."""
    numbers = as_numbers("position_ids", positions)
    if numbers.dim() == 1:
        numbers = numbers.unsqueeze(0)
    if numbers.dim() != 2 or numbers.shape[1] != expected.shape[1] or len(numbers) not in (1, len(expected)):
        return False
    return bool(((numbers == expected) | (expected < 0)).all())
