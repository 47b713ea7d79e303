"""K and V as callers hand them in and get them back: nested tuples or one tensor, in either format.

"vllm"          one tensor [layers, parts, tokens, heads, size], or for each layer (K, V) of [tokens, heads, size]
"huggingface"   one tensor [layers, parts, heads, tokens, size], or for each layer (K, V) of [heads, tokens, size]
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvpage.checks.tensors import check_plain
from kvpage.checks.tokens import as_array
from kvpage.store.records.record import Shape
from kvpage.store.tiers.stretches import Runs, digests_of

KVTensors = torch.Tensor | Sequence[Sequence[torch.Tensor]]
Parts = list[list[torch.Tensor]]
"""By layer and part, each [tokens, heads, size] or [heads, tokens, size]."""


def token_dim(fmt: str) -> int:
    """Return the dimension of the tokens in one layer's K."""
    return 0 if fmt == "vllm" else 1


def as_parts(kv_tensors: KVTensors, fmt: str, dtype: torch.dtype | None) -> Parts:
    """Return K and V as parts. dtype: of all parts; None for any one dtype.

    Raises ValueError or TypeError for other values, and unless all parts have one shape and the dtype.
    """
    if isinstance(kv_tensors, torch.Tensor):
        check_plain("kv_tensors", kv_tensors)
        if kv_tensors.dim() != 5:
            raise ValueError(f"kv_tensors must have 5 dimensions as one tensor, got shape {list(kv_tensors.shape)}")
        parts = [list(layer) for layer in kv_tensors]
    else:
        parts = [list(layer) if isinstance(layer, (tuple, list)) else [layer] for layer in kv_tensors]
    flat = [part for layer in parts for part in layer]
    if not flat:
        raise ValueError("kv_tensors must hold at least one layer, got none")
    for part in flat:
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"kv_tensors must be of tensors, got {type(part).__name__}")
        check_plain("kv_tensors", part)
        if part.device.type == "meta":
            raise ValueError("kv_tensors must have memory, got a tensor on meta")
    first = flat[0]
    if first.dim() != 3 or any(part.shape != first.shape for part in flat) or len({len(layer) for layer in parts}) > 1:
        shapes = sorted({tuple(part.shape) for part in flat})
        raise ValueError(f"all parts of kv_tensors must be of one shape of 3 dimensions, got {shapes}")
    if 0 in [n for dim, n in enumerate(first.shape) if dim != token_dim(fmt)]:
        raise ValueError(f"kv_tensors must have heads, of a positive size, got parts of shape {list(first.shape)}")
    if any(part.dtype != (dtype or first.dtype) for part in flat):
        wanted = dtype or "one dtype"
        raise ValueError(f"kv_tensors must be of {wanted}, got {', '.join(sorted({str(part.dtype) for part in flat}))}")
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


class TensorChunk:
    """Tokens of parts as a payload whose stretches are layers.

    parts: of each layer, with these tokens alone; on any device to store them, on the CPU to load them. num_tokens: of
    the payload, of which the parts take the last ones.
    """

    def __init__(self, parts: Parts, fmt: str, num_tokens: int) -> None:
        self.shape = chunk_shape(parts, fmt, num_tokens)
        self.stretch_bytes = math.prod(self.shape[1:]) * parts[0][0].element_size()
        self._parts, self._dim = parts, token_dim(fmt)

    def fill(self, begin: int, buffer: memoryview, num_threads: int, streaming: bool) -> bytes:
        digests = []
        for layer, data in self._layers(begin, buffer):
            for part, room in zip(layer, np.split(np.frombuffer(data, np.uint8), len(layer)), strict=True):
                source = as_bytes(part.cpu() if part.stride(-1) == 1 else part.cpu().contiguous())
                np.copyto(room.reshape(source.shape), source)
            digests.append(digests_of(data, self.stretch_bytes))
        return b"".join(digests)

    def runs(self) -> Runs | None:
        """Return the memory of the parts, if all are contiguous and on the CPU."""
        parts = [part for layer in self._parts for part in layer]
        if not all(part.device.type == "cpu" and part.is_contiguous() for part in parts):
            return None
        return np.array([(part.data_ptr(), part.nbytes) for part in parts], np.int64)

    def take(self, begin: int, piece: memoryview, num_threads: int) -> bytes:
        digests = []
        for layer, data in self._layers(begin, piece):
            digests.append(digests_of(data, self.stretch_bytes))
            for part, rows in zip(layer, np.split(np.frombuffer(data, np.uint8), len(layer)), strict=True):
                target = as_bytes(part)
                source = rows.reshape(*self.shape[2:4], target.shape[-1])
                num_left = source.shape[self._dim] - target.shape[self._dim]
                np.copyto(target, source[num_left:] if self._dim == 0 else source[:, num_left:])
        return b"".join(digests)

    def _layers(self, begin: int, data: memoryview) -> Iterator[tuple[list[torch.Tensor], memoryview]]:
        """Walk over the parts of each layer, with its bytes."""
        for at in range(0, len(data), self.stretch_bytes):
            yield self._parts[(begin + at) // self.stretch_bytes], data[at : at + self.stretch_bytes]


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


def empty_chunks(shape: Shape, fmt: str, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Return host memory for `num_tokens` of chunks of that shape; pinned if there is a GPU."""
    return torch.empty(with_tokens(shape, fmt, num_tokens), dtype=dtype, pin_memory=torch.cuda.is_available())


def as_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a view of a CPU tensor's bytes, its last dimension longer by the size of an element."""
    return tensor.view(torch.uint8).numpy()


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
