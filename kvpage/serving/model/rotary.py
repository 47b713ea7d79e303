"""Find at load, by computing, how each layer of a model rotates its K.

The tables are the model's own: each of its modules with inverse frequencies computes cosines and sines. A layer uses
one of these tables. Its pairs are neighbours or halves, and begin somewhere in a head. The right choice rotates K at
some positions to K at others:

    tokens at positions 0, 1, 2, ...      K of layer l  ──rotated by d──┐
    the same tokens at d, d + 1, ...      K of layer l  ════════════════╧═ must be equal

A model for which no choice does that is refused: its positions are of another kind.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvpage.blend.rotary import CosSin, RotaryTables
from kvpage.serving.model.limits import CHANGING_ROPE, rope_types

MAX_ERROR = 1e-4  # relative, in fp32
MAX_ERROR_HALF = 0.05


def check_rope(model: PreTrainedModel) -> None:
    """Raise ValueError for frequencies that change with the length: a segment's K would differ in a longer prompt."""
    changing = sorted(rope_types(model) & set(CHANGING_ROPE))
    if changing:
        raise ValueError(
            f"blend needs rotary frequencies that do not change with the length, those of {type(model).__name__} are "
            f"{', '.join(changing)}"
        )


def rotary_of_layers(
    model: PreTrainedModel,
    at_zero: Sequence[tuple[torch.Tensor, torch.Tensor]],
    shifted: Sequence[tuple[torch.Tensor, torch.Tensor]],
    shift: int,
) -> list[RotaryTables | None]:
    """Return the tables of each layer; None where K is not rotated.

    at_zero, shifted: (K, V) of each layer, [num_tokens, kv heads, size], of the same tokens at positions 0, 1, ... and
    at shift, shift + 1, .... Raises ValueError, with the layer, if no table rotates the one to the other.
    """
    limit = MAX_ERROR if min(model.dtype.itemsize, at_zero[0][0].dtype.itemsize) >= 4 else MAX_ERROR_HALF
    tables = list(_tables(model, at_zero[0][0].device))
    best_tables: list[RotaryTables | None] = []
    for layer, ((key, value), (key_there, value_there)) in enumerate(zip(at_zero, shifted, strict=True)):
        errors: list[tuple[float, RotaryTables | None]] = [(_error(key, key_there), None)]
        candidates = _candidates(tables, key.shape[-1])
        errors += [(_rotation_error(rotary, key, key_there, shift), rotary) for rotary in candidates]
        error, best = min(errors, key=lambda entry: entry[0])
        if not max(error, _error(value, value_there)) <= limit:
            raise ValueError(
                f"blend needs K that rotary embeddings rotate by position and V without position, those of layer "
                f"{layer} of {type(model).__name__} are {error:.1e} and {_error(value, value_there):.1e} off (relative)"
            )
        best_tables.append(best)
    return best_tables


def _rotation_error(rotary: RotaryTables, key: torch.Tensor, expected: torch.Tensor, shift: int) -> float:
    old = torch.arange(len(key), device=key.device)
    return _error(rotary.rotate(key, old, old + shift), expected)


def _error(computed: torch.Tensor, expected: torch.Tensor) -> float:
    return float((computed.float() - expected.float()).norm() / expected.float().norm())


def _candidates(tables: Sequence[CosSin], head_size: int) -> Iterator[RotaryTables]:
    """Yield each way to rotate heads of this size by the tables."""
    for table in tables:
        cos, _ = table(torch.zeros(1, dtype=torch.int64))
        size, scaling = 2 * cos.shape[-1], float(cos[0, 0])  # the cosine of 0, scaled
        for offset in sorted({0, head_size - size}):
            for is_interleaved in (False, True):
                if offset >= 0 and size <= head_size:
                    yield RotaryTables(table, head_size, size, is_interleaved, scaling, offset)


def _tables(model: PreTrainedModel, device: torch.device) -> Iterator[CosSin]:
    """Yield the table of each module with inverse frequencies, for each type of layer that it distinguishes."""
    kinds = sorted(set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()))
    for module in model.modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            takes_kind = "layer_type" in inspect.signature(module.forward).parameters
            for arguments in [(kind,) for kind in kinds] if takes_kind else [()]:
                yield _Table(module, arguments, device)


class _Table:
    """Call a rotary module as the model does, in fp32, and return each angle once.

    Modules may return each angle once or twice: as two equal halves, or side by side.
    """

    def __init__(self, module: nn.Module, arguments: tuple[Any, ...], device: torch.device) -> None:
        self._module, self._arguments, self._device = module, arguments, device
        probe = torch.cat(self._whole(torch.arange(1, 4)))
        width = probe.shape[-1]
        self._once = slice(None)
        if width % 2 == 0 and torch.equal(probe[:, : width // 2], probe[:, width // 2 :]):
            self._once = slice(width // 2)
        elif width % 2 == 0 and torch.equal(probe[:, 0::2], probe[:, 1::2]):
            self._once = slice(0, None, 2)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._whole(positions)
        return cos[:, self._once], sin[:, self._once]

    def _whole(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        row = positions.to(self._device).long().unsqueeze(0)
        like = torch.empty(1, 1, dtype=torch.float32, device=self._device)
        cos, sin = self._module(like, row, *self._arguments)
        return cos[0].float(), sin[0].float()
