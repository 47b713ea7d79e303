"""PageView: foreign tensors as pages, whose memory is read and written where it is.

    tensors    [ page 0 | page 1 | page 2 | ... ]     one a layer, or one of all; the dimension of pages may be any
    record     [ page 7 of tensor 0 | of tensor 1 | .. ][ page 2 of tensor 0 | .. ]       of the ids 7, 2

The bytes of a page are in the order of memory: the dimension with the longest stride first. So a page that is in one
piece is one run, whatever its dimensions mean.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage.checks.values import as_integer
from kvpage.store.bytes.pieces import Pieces, check_memory, share_bytes

NULL_PAGE = -1


class _Runs(NamedTuple):
    """The runs of page 0, int64 [runs] each: addresses, 0 for bytes that are not wanted; lengths; bytes to page 1."""

    addresses: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]


class PageView:
    """Pages of tensors in host memory, as buffers of a `ByteStore`. It holds the tensors.

    Put `name` into the store's header: then pages of another shape, dtype, order or version are never mixed up.

    Args:
        tensors: strided, in host memory, with as many pages each. No two of their elements share a byte. They keep
            their storage as long as the view is used.
        page_dim: the dimension that counts pages.
        token_dim: the dimension that counts the tokens of a page, for loads from a token on. None: a page counts as one
            token.
        version: any text that tells meanings of the bytes apart.

    Raises:
        ValueError: the tensors do not fit together, share bytes, are conjugate or negative views, or have no such
            dimension, or no bytes.
        TypeError: they are no tensors.
    """

    def __init__(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        page_dim: int = 0,
        token_dim: int | None = None,
        version: str = "",
    ) -> None:
        self._tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        self._page_dim, self._token_dim = page_dim, token_dim
        for tensor in self._tensors:
            _check(tensor, page_dim, token_dim)
        counts = {tensor.shape[page_dim] for tensor in self._tensors}
        sizes = {1 if token_dim is None else tensor.shape[token_dim] for tensor in self._tensors}
        if len(counts) != 1 or len(sizes) != 1:
            raise ValueError(f"tensors must have as many pages and tokens each, got {counts} pages, {sizes} tokens")
        (self.num_pages,), (self.page_size,) = counts, sizes
        self.page_bytes = sum(tensor.numel() // self.num_pages * tensor.element_size() for tensor in self._tensors)
        self.name: list[Any] = ["pages", version, token_dim, *map(self._described, self._tensors)]
        """The meaning of a page's bytes, as a value of a store's header. The number of pages is no part of it."""
        self._whole = self._page_runs(0)
        if _meet(self._tensors) and share_bytes(_of_pages(self._whole, np.arange(self.num_pages)).reshape(-1, 2)):
            raise ValueError("tensors must share no byte with each other, got some that do")

    def pieces(self, page_ids: npt.ArrayLike, start: int = 0) -> list[Pieces | None]:
        """Return the memory of records, each of some pages, as buffers for `put` and `get_into`.

        With a start or a null page within a record, the buffers are for `get_into` alone.

        Args:
            page_ids: int [num_records], or [num_records, pages_per_record]. NULL_PAGE, -1, stands for a page that is
                not there: its bytes are left out when a record is read. A record without any page is None.
            start: tokens, from the first page of the first record on, whose memory is not written. Records before it
                are None.

        Raises:
            ValueError: an id is not that of a page, or start is negative.
        """
        ids = np.asarray(page_ids)
        if ids.size and ids.dtype.kind not in "iu":
            raise ValueError(f"page_ids must be integers, got {ids.dtype}")
        if ids.ndim not in (1, 2):
            raise ValueError(f"page_ids must have one or two dimensions, got shape {ids.shape}")
        if ids.size and not NULL_PAGE <= int(ids.min()) <= int(ids.max()) < self.num_pages:
            raise ValueError(f"page_ids must be in [-1, {self.num_pages}), got {int(ids.min())} to {int(ids.max())}")
        start = as_integer("start", start)
        if start < 0:
            raise ValueError(f"start must not be negative, got {start}")
        if not ids.size:
            return [None] * len(ids)
        rows = ids.reshape(len(ids), -1).astype(np.int64)
        num_skipped, token = divmod(start, self.page_size)
        rows.reshape(-1)[:num_skipped] = NULL_PAGE
        runs = _of_pages(self._whole, rows)
        records = [record.reshape(-1, 2) for record in runs]
        if token and num_skipped < rows.size:
            number, at = divmod(num_skipped, rows.shape[1])
            first = _of_pages(self._page_runs(token), rows[number, at])  # in more runs, often
            before, after = (runs[number, part].reshape(-1, 2) for part in (slice(at), slice(at + 1, None)))
            records[number] = np.concatenate([before, first, after])
        pairs = zip(records, rows, strict=True)
        return [Pieces(record, self._tensors, ids) if ids.max() >= 0 else None for record, ids in pairs]

    def _order(self, tensor: torch.Tensor) -> list[int]:
        """Return the dimensions of a page, in the order of memory."""
        dims, strides = (dim for dim in range(tensor.dim()) if dim != self._page_dim), tensor.stride()
        return sorted(dims, key=lambda dim: -strides[dim])

    def _described(self, tensor: torch.Tensor) -> list[Any]:
        """Return dtype and shape of a page, and its dimensions in the order of memory."""
        shape = [size for dim, size in enumerate(tensor.shape) if dim != self._page_dim]
        return [str(tensor.dtype).removeprefix("torch."), self._page_dim, shape, self._order(tensor)]

    def _page_runs(self, token: int) -> _Runs:
        """Return the runs of page 0; its bytes before the token are not wanted."""
        parts = [
            _tensor_runs(tensor, self._order(tensor), self._page_dim, self._token_dim, token)
            for tensor in self._tensors
        ]
        return _Runs(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _check(tensor: torch.Tensor, page_dim: int, token_dim: int | None) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensors must be torch tensors, got {type(tensor).__name__}")
    check_memory(tensor)
    for name, dim in (("page_dim", page_dim), ("token_dim", token_dim)):
        if dim is not None and not 0 <= as_integer(name, dim) < tensor.dim():
            raise ValueError(f"{name} must be a dimension, in [0, {tensor.dim()}), got {dim}")
    if page_dim == token_dim:
        raise ValueError(f"token_dim must be another dimension than page_dim, got {token_dim}")
    if tensor.numel() == 0:
        raise ValueError(f"tensors must have elements, got shape {tuple(tensor.shape)}")
    extent = 0
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if stride <= extent:
            raise ValueError(
                f"elements must share no byte, got strides {tensor.stride()} of shape {tuple(tensor.shape)}"
            )
        extent += (size - 1) * stride


def _meet(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the stretches of memory from the first to the last byte of two tensors overlap."""
    ends = [
        sum((size - 1) * by for size, by in zip(tensor.shape, tensor.stride(), strict=True)) + 1 for tensor in tensors
    ]
    return share_bytes(
        np.array([(tensor.data_ptr(), end * tensor.element_size()) for tensor, end in zip(tensors, ends, strict=True)])
    )


def _tensor_runs(tensor: torch.Tensor, order: list[int], page_dim: int, token_dim: int | None, token: int) -> _Runs:
    """Return the runs of page 0 of one tensor. order: of the page's dimensions."""
    size = tensor.element_size()
    outer, length = list(order), size
    while outer and tensor.stride(outer[-1]) * size == length and not (token and outer[-1] == token_dim):
        length *= tensor.shape[outer.pop()]
    shape = [tensor.shape[dim] for dim in outer]
    places = np.indices(shape, np.int64).reshape(len(shape), math.prod(shape))
    strides = np.array([tensor.stride(dim) * size for dim in outer], np.int64)
    addresses = tensor.data_ptr() + (strides[:, None] * places).sum(0, dtype=np.int64)
    if token and token_dim in outer:
        addresses[places[outer.index(token_dim)] < token] = 0
    count = len(addresses)
    return _Runs(addresses, np.full(count, length, np.int64), np.full(count, tensor.stride(page_dim) * size, np.int64))


def _of_pages(runs: _Runs, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the runs of pages: int64 [*ids, runs, 2]."""
    made = np.empty((*ids.shape, len(runs.lengths), 2), np.int64)
    addresses = made[..., 0]
    np.add(runs.addresses, ids[..., None] * runs.steps, out=addresses)
    addresses[ids < 0] = 0
    addresses[..., runs.addresses == 0] = 0
    made[..., 1] = runs.lengths
    return made
