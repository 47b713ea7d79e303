"""TensorChunk: tokens of K and V in tensors, as a payload whose stretches are layers.

part          [tokens, heads, size], with any strides                         "huggingface": [heads, tokens, size]
TokenParts    K and V of all tokens of a call, in parts of one shape; where rows are whole, runs of their memory
TensorChunk   some of these tokens
spans         of some tokens in one part: offset and bytes of each run, neighbours joined
"""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from kvpage.store.records.kv_tensors import Parts, chunk_shape, token_dim
from kvpage.store.tiers.stretches import Runs, digests_of, gather_stretches, scatter_stretches

Spans = npt.NDArray[np.int64]
"""int64 [n, 2]: offset, or UNWANTED, and length of n runs of bytes."""
UNWANTED = -1
MIN_ROW_BYTES = 64  # of rows with gaps between them: smaller ones are copied by numpy
MIN_RUN_BYTES = 4096  # of memory that is written to a file directly; shorter runs are copied into one piece first
STREAM_BYTES = 1 << 20  # of bytes written past the CPU's cache: the caller of a smaller read may find its bytes there


class TokenParts:
    """K and V of tokens, all parts of one shape and dtype. A user of the runs keeps the parts alive."""

    def __init__(self, parts: Parts, fmt: str) -> None:
        self.parts, self.fmt = parts, fmt
        flat, dim = [part for layer in parts for part in layer], token_dim(fmt)
        first, strides, size = flat[0], flat[0].stride(), flat[0].element_size()
        self._addresses: npt.NDArray[np.int64] | None = None
        if (first.shape[2] > 1 and strides[2] != 1) or {(part.is_cpu, part.stride()) for part in flat} != {
            (True, strides)
        }:
            return
        self._addresses = np.array([part.data_ptr() for part in flat], np.int64)
        self._row_bytes, self._num_heads = first.shape[2] * size, first.shape[1 - dim]
        self._token_stride, self._head_stride = strides[dim] * size, strides[1 - dim] * size
        self._spans: dict[tuple[int, int], Spans] = {}

    def runs(self, begin: int, end: int, num_unwanted: int = 0) -> Runs | None:
        """Return the runs of the tokens [begin, end) of all parts.

        None for runs that are too short, and for parts that are not in host memory, not alike, or without whole rows.
        num_unwanted: tokens of the payload before the others, whose runs have the address 0.
        """
        if self._addresses is None:
            return None
        spans = self._spans_of(end - begin, num_unwanted)
        if len(spans) * MIN_ROW_BYTES > spans[:, 1].sum():
            return None
        runs = np.empty((len(self._addresses), len(spans), 2), np.int64)
        runs[:, :, 0] = np.add.outer(self._addresses + begin * self._token_stride, spans[:, 0])
        runs[:, spans[:, 0] == UNWANTED, 0] = 0
        runs[:, :, 1] = spans[:, 1]
        return runs.reshape(-1, 2)

    def _spans_of(self, num_tokens: int, num_unwanted: int) -> Spans:
        key = num_tokens, num_unwanted
        if key not in self._spans:
            tokens = np.arange(num_tokens) * self._token_stride
            lead = np.full(num_unwanted, UNWANTED)
            heads = np.arange(self._num_heads) * self._head_stride
            if self.fmt == "vllm":
                rows = np.concatenate([np.repeat(lead, len(heads)), np.add.outer(tokens, heads).ravel()])
            else:
                rows = np.concatenate([[*lead, *(tokens + head)] for head in heads])
            self._spans[key] = _joined(rows, self._row_bytes)
        return self._spans[key]


class TensorChunk:
    """Some of the tokens: to be stored from any device, to be loaded on the CPU.

    num_unwanted: leading tokens of the payload that the tensors lack.
    """

    piece_ends = None

    def __init__(self, tokens: TokenParts, begin: int, end: int, num_unwanted: int = 0) -> None:
        parts = tokens.parts
        self.shape = chunk_shape(parts, tokens.fmt, num_unwanted + end - begin)
        self.stretch_bytes = math.prod(self.shape[1:]) * parts[0][0].element_size()
        self._tokens, self._begin, self._end = tokens, begin, end
        self._runs = tokens.runs(begin, end, num_unwanted)

    def fill(self, begin: int, buffer: memoryview, num_threads: int, streaming: bool) -> bytes:
        if self._runs is not None:
            runs = self._runs_of_layers(begin, len(buffer), self._runs)
            return gather_stretches(runs, buffer, self.stretch_bytes, num_threads, streaming)
        digests = []
        for layer, data in self._layers(begin, buffer):
            for part, room in zip(layer, np.split(np.frombuffer(data, np.uint8), len(layer)), strict=True):
                source = as_bytes(part.cpu() if part.stride(-1) == 1 else part.cpu().contiguous())
                np.copyto(room.reshape(source.shape), source)
            digests.append(digests_of(data, self.stretch_bytes))
        return b"".join(digests)

    def runs(self) -> Runs | None:
        """Return the memory of the parts, if it is on the CPU, in long runs."""
        runs = self._runs
        if runs is None:
            return None
        num_parts = self.shape[0] * self.shape[1]
        num_bytes = self.stretch_bytes * self.shape[0]
        return runs if len(runs) == num_parts or len(runs) * MIN_RUN_BYTES <= num_bytes else None

    def take(self, begin: int, piece: memoryview, num_threads: int) -> bytes:
        if self._runs is not None:
            runs = self._runs_of_layers(begin, len(piece), self._runs)
            streaming = self.stretch_bytes * self.shape[0] >= STREAM_BYTES
            return scatter_stretches(piece, runs, self.stretch_bytes, num_threads, streaming)
        digests, dim = [], token_dim(self._tokens.fmt)
        for layer, data in self._layers(begin, piece):
            digests.append(digests_of(data, self.stretch_bytes))
            for part, rows in zip(layer, np.split(np.frombuffer(data, np.uint8), len(layer)), strict=True):
                target = as_words(part)
                source = rows.view(target.dtype).reshape(self.shape[2:])
                num_unwanted = source.shape[dim] - part.shape[dim]
                np.copyto(target, source[num_unwanted:] if dim == 0 else source[:, num_unwanted:])
        return b"".join(digests)

    def _runs_of_layers(self, begin: int, num_bytes: int, runs: Runs) -> Runs:
        """Return the runs of whole layers, `num_bytes` from the byte `begin` on."""
        of_layer = len(runs) // self.shape[0]
        first = begin // self.stretch_bytes
        return runs[first * of_layer : (first + num_bytes // self.stretch_bytes) * of_layer]

    def _layers(self, begin: int, data: memoryview) -> Iterator[tuple[list[torch.Tensor], memoryview]]:
        """Walk over the parts of each layer, with its bytes."""
        dim = token_dim(self._tokens.fmt)
        for at in range(0, len(data), self.stretch_bytes):
            layer = self._tokens.parts[(begin + at) // self.stretch_bytes]
            parts = [part.narrow(dim, self._begin, self._end - self._begin) for part in layer]
            yield parts, data[at : at + self.stretch_bytes]


def _joined(rows: npt.NDArray[np.int64], row_bytes: int) -> Spans:
    """Return the rows at these offsets, neighbours in memory as one."""
    is_next = np.where(rows[1:] == UNWANTED, rows[:-1] == UNWANTED, rows[1:] == rows[:-1] + row_bytes)
    is_next &= (rows[1:] == UNWANTED) == (rows[:-1] == UNWANTED)
    begins = np.flatnonzero(np.concatenate([[True], ~is_next]))
    counts = np.diff(np.append(begins, len(rows)))
    return np.stack([rows[begins], counts * row_bytes], axis=1).astype(np.int64)


def as_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a view of a CPU tensor's bytes, its last dimension longer by the size of an element."""
    return tensor.view(torch.uint8).numpy()


_WORDS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def as_words(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    """Return a view of a CPU tensor's elements, with any strides, as numbers of their size that are not changed."""
    return tensor.view(_WORDS_OF[tensor.element_size()]).numpy()
