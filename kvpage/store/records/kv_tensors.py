"""K and V as callers hand them in and get them back: nested tuples or one tensor, in either format.

"vllm"          one tensor [layers, parts, tokens, heads, size], or for each layer (K, V) of [tokens, heads, size]
"huggingface"   one tensor [layers, parts, heads, tokens, size], or for each layer (K, V) of [heads, tokens, size]
"""

from collections.abc import Sequence

import numpy.typing as npt
import torch

from kvpage.checks.tensors import check_plain
from kvpage.checks.tokens import as_array
from kvpage.store.records.record import Shape

KVTensors = torch.Tensor | Sequence[Sequence[torch.Tensor]]
Parts = list[list[torch.Tensor]]
"""By layer and part, each [tokens, heads, size] or [heads, tokens, size]."""


def token_dim(fmt: str) -> int:
    """Return the dimension of the tokens in one layer's K."""
    return 0 if fmt == "vllm" else 1


def as_parts(kv_tensors: KVTensors, fmt: str, dtype: torch.dtype | None, name: str = "kv_tensors") -> Parts:
    """Return K and V as parts. dtype: of all parts; None for any one dtype. name: in errors.

    Raises ValueError or TypeError for other values, and unless all parts have one shape and the dtype.
    """
    if isinstance(kv_tensors, torch.Tensor):
        check_plain(name, kv_tensors)
        if kv_tensors.dim() != 5:
            raise ValueError(f"{name} must have 5 dimensions as one tensor, got shape {list(kv_tensors.shape)}")
        parts = [list(layer) for layer in kv_tensors]
    else:
        parts = [list(layer) if isinstance(layer, (tuple, list)) else [layer] for layer in kv_tensors]
    flat = [part for layer in parts for part in layer]
    if not flat:
        raise ValueError(f"{name} must hold at least one layer, got none")
    shapes, dtypes = set[tuple[int, ...]](), set[torch.dtype]()
    for part in flat:
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"{name} must be of tensors, got {type(part).__name__}")
        check_plain(name, part)
        if part.device.type == "meta":
            raise ValueError(f"{name} must have memory, got a tensor on meta")
        shapes.add(tuple(part.shape))
        dtypes.add(part.dtype)
    first, *others = shapes
    if others or len(first) != 3 or len(set(map(len, parts))) > 1:
        raise ValueError(f"all parts of {name} must be of one shape of 3 dimensions, got {sorted(shapes)}")
    if 0 in (first[2], first[1 - token_dim(fmt)]):
        raise ValueError(f"{name} must have heads, of a positive size, got parts of shape {list(first)}")
    if dtypes != {dtype or flat[0].dtype}:
        raise ValueError(f"{name} must be of {dtype or 'one dtype'}, got {', '.join(sorted(map(str, dtypes)))}")
    return parts


def chunk_shape(parts: Parts, fmt: str, num_tokens: int) -> Shape:
    """Return the shape of a chunk of `num_tokens` of their tokens."""
    first, second, size = parts[0][0].shape
    rows = (num_tokens, second) if fmt == "vllm" else (first, num_tokens)
    return len(parts), len(parts[0]), *rows, size


def with_tokens(shape: Shape, fmt: str, num_tokens: int) -> Shape:
    """Return the shape of a chunk of `num_tokens` instead."""
    dims = list(shape)
    dims[2 + token_dim(fmt)] = num_tokens
    return dims[0], dims[1], dims[2], dims[3], dims[4]


def tokens_of(parts: Parts, fmt: str, begin: int, end: int) -> Parts:
    """Return views of the tokens [begin, end)."""
    dim = token_dim(fmt)
    return [[part.narrow(dim, begin, end - begin) for part in layer] for layer in parts]


def owned(parts: Parts, fmt: str, begin: int) -> Parts:
    """Return the tokens from `begin` on, copied to host memory."""
    dim = token_dim(fmt)
    return [
        [part.narrow(dim, begin, part.shape[dim] - begin).to("cpu", copy=True) for part in layer] for layer in parts
    ]


def as_tuple(chunks: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Return views, for each layer (K, V)."""
    return tuple(tuple(layer) for layer in chunks)


def num_leading_false(name: str, mask: npt.ArrayLike | torch.Tensor | None, num_tokens: int) -> int:
    """Count the leading False of a mask that is True from there on. Raises ValueError for any other mask."""
    if mask is None:
        return 0
    if isinstance(mask, torch.Tensor):
        check_plain(name, mask)
        mask = mask.cpu() if mask.is_cuda else mask
    array = as_array(mask, name)
    if array.shape != (num_tokens,) or array.dtype.kind not in "biu":
        raise ValueError(f"{name} must be {num_tokens} bools, got {array.dtype} {list(array.shape)}")
    flags = array.astype(bool)
    count = num_tokens - int(flags.sum())
    if not flags[count:].all():
        raise ValueError(f"{name} must be False for leading tokens only")
    return count
