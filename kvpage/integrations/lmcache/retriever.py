"""Retrievers: they look up segments of prompts in a store, in the background, at any position.

    input_tokens     [ request 0            | request 1      ]
    segments         [ a      | b     | c   | a      | d     ]      cut by separators, by contents, or by the caller
    the store has      all      part    -     all      all
    valid_mask       [ 1 1 1 1  1 1 0 0 0 0   1 1 1 1  1 1 1 ]      of each segment the leading tokens that were found

Each segment is fetched once, by a few threads; `new_request` only cuts. Requests share no state.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blend.boundaries import ContentBoundaries
from kvpage.blend.segment_store import NAMESPACE, Segment, SegmentStore
from kvpage.checks.tensors import as_bounds, as_device, as_numbers
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import as_integer, as_list, check_namespace
from kvpage.integrations.lmcache.cuts import cut_after_separators, named_cuts
from kvpage.integrations.lmcache.interfaces import BlendRetriever, BlendRetrieverResult, BlendRetrieverTask
from kvpage.store import KVStore, KVStoreMetadata

R = TypeVar("R", bound="_SegmentRetriever")


class SegmentSource(Protocol):
    """Finds one segment. Called from several threads; its errors are raised by the task's result."""

    def get(self, tokens: Tokens, namespace: bytes = b"") -> Segment | None:
        """Return the leading tokens that are there.

        Args:
            tokens: int32 [num_tokens], of one segment.
            namespace: the tenant's name.

        Returns:
            K and V of the leading tokens, in host memory that no other thread writes; None if there are none.
        """


class _PlainStore:
    """A KVStore whose segments are sequences of their own, computed standalone, in a namespace followed by the
    tenant's name.
    """

    def __init__(self, store: KVStore, namespace: bytes) -> None:
        self._store, self._namespace = store, namespace

    @property
    def place(self) -> str:
        return (
            f"namespace {self._namespace!r} of the store, followed by the tenant's name: store them there, or give the "
            "retriever the namespace that they are in"
        )

    def get(self, tokens: Tokens, namespace: bytes = b"") -> Segment | None:
        kv, mask = self._store.retrieve(tokens, return_tuple=False, namespace=self._namespace + namespace)
        return Segment(kv, torch.arange(int(mask.sum())), is_standalone=True) if len(kv) else None


class SegmentFetch(NamedTuple):
    """A segment of the input tokens that is being fetched."""

    begin: int
    end: int
    segment: "Future[Segment | None]"


class SegmentRetrieverTask(BlendRetrieverTask):
    """Segments under way. Each result has memory of its own.

    Args:
        fetched: the segments of the input tokens that are being fetched.
        num_tokens: the number of input tokens.
        token_dim: the dimension of tokens in one part of a segment: 0 for "vllm", 1 for "huggingface".
        device: of results.
        place: a description of the source, for `reason`.
    """

    def __init__(
        self,
        fetched: Sequence[SegmentFetch],
        num_tokens: int,
        token_dim: int,
        device: torch.device | str = "cpu",
        place: str = "the store",
    ) -> None:
        self._fetched, self._num_tokens, self._token_dim, self._device = fetched, num_tokens, token_dim, device
        self._place = place

    def result(self, layer_id: int) -> BlendRetrieverResult:
        """Wait for the segments and return one layer of them.

        Args:
            layer_id: the layer, from 0.

        Returns:
            K and V at their rows, with the mask of valid rows and their original positions.

        Raises:
            ValueError: the segments lack the layer, or have several shapes. Errors of the store are raised, too.
        """
        segments = [
            (fetch.begin, segment) for fetch in self._fetched if (segment := fetch.segment.result()) is not None
        ]
        shapes = {(len(segment.kv), segment.kv.shape[1], *self._inner(segment)) for _, segment in segments}
        if len(shapes) > 1:
            raise ValueError(f"all segments must be of one shape, got {sorted(shapes)}")
        num_layers = next(iter(shapes))[0] if shapes else layer_id + 1
        if not 0 <= as_integer("layer_id", layer_id) < num_layers:
            raise ValueError(f"layer_id must be in [0, {num_layers}), got {layer_id}")
        valid, positions = self._rows(segments)
        if not segments:
            return BlendRetrieverResult(None, None, valid, positions, reason=self._reason())
        k, v = (self._part(segments, layer_id, part) for part in (0, 1))
        heads, head_size = self._inner(segments[0][1])
        return BlendRetrieverResult(k, v, valid, positions, (heads, head_size))

    def _reason(self) -> str:
        if not self._fetched:
            return "there are no segments, since no tokens were given"
        return f"of {len(self._fetched)} segments none is in {self._place}"

    def _inner(self, segment: Segment) -> torch.Size:
        """Return the shape of a token's row: heads and their size."""
        return segment.kv[0, 0].movedim(self._token_dim, 0).shape[1:]

    def _rows(self, segments: list[tuple[int, Segment]]) -> tuple[torch.Tensor, torch.Tensor]:
        valid = torch.zeros(self._num_tokens, dtype=torch.bool)
        positions = torch.zeros(self._num_tokens, dtype=torch.int64)
        for begin, segment in segments:
            valid[begin : begin + segment.num_tokens] = True
            positions[begin : begin + segment.num_tokens] = segment.positions
        return valid.to(self._device), positions.to(self._device)

    def _part(self, segments: list[tuple[int, Segment]], layer_id: int, part: int) -> torch.Tensor:
        """Return K or V, [num_tokens, hidden]; [num_tokens, 0] for a V that the model does not cache (MLA)."""
        kv = segments[0][1].kv
        if part >= kv.shape[1]:
            return torch.empty(self._num_tokens, 0, dtype=kv.dtype, device=self._device)
        rows = torch.zeros(self._num_tokens, *self._inner(segments[0][1]), dtype=kv.dtype, device=self._device)
        for begin, segment in segments:
            rows[begin : begin + segment.num_tokens] = segment.kv[layer_id, part].movedim(self._token_dim, 0)
        return rows.flatten(1)


SPTBlendRetrieverTask = SegmentRetrieverTask


class _SegmentRetriever(BlendRetriever):
    """The threads that fetch, and the way from tokens to segments. `close` it, or use it in `with`.

    cache_engine: a SegmentStore, a KVStore with segments in a namespace (followed by the tenant's name), or another
        SegmentSource. metadata: of K and V. device: of results. num_threads: that fetch. namespace: of a KVStore
        alone; None for b"blend"; b"" for sequences that were stored without one.
    """

    def __init__(
        self,
        cache_engine: KVStore | SegmentStore | SegmentSource,
        metadata: KVStoreMetadata,
        device: torch.device | str,
        num_threads: int,
        namespace: bytes | None = None,
    ) -> None:
        if not callable(getattr(cache_engine, "get", None)) and not isinstance(cache_engine, KVStore):
            raise TypeError(f"cache_engine must find segments, got {type(cache_engine).__name__}")
        if not isinstance(metadata, KVStoreMetadata):
            raise TypeError(f"metadata must be a KVStoreMetadata, got {type(metadata).__name__}")
        num_threads = as_integer("num_threads", num_threads)
        store = cache_engine.store if isinstance(cache_engine, SegmentStore) else cache_engine
        if isinstance(store, KVStore) and metadata not in (store.metadata, store.given_metadata):
            raise ValueError(f"metadata must be the store's, got {metadata}")
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        if namespace is not None:
            check_namespace(namespace)
            if not isinstance(cache_engine, KVStore):
                raise ValueError(f"namespace must be None but for a KVStore, got {namespace!r}")
        self._source: SegmentSource = (
            _PlainStore(cache_engine, NAMESPACE if namespace is None else namespace)
            if isinstance(cache_engine, KVStore)
            else cache_engine
        )
        self._place = getattr(self._source, "place", f"the {type(cache_engine).__name__}")
        self._token_dim = 0 if metadata.fmt == "vllm" else 1
        self._device = as_device("device", device)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kvpage-blend")

    def close(self) -> None:
        """Wait for fetches that have begun and cancel the others, whose results raise. A second call does nothing."""
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(
        self,
        input_tokens: torch.Tensor,
        query_start_loc: torch.Tensor,
        namespaces: Sequence[bytes] | None,
        cuts: Callable[[npt.NDArray[np.int32], int], list[int]],
    ) -> SegmentRetrieverTask:
        """Begin to fetch. cuts(tokens, begin): the ends of the segments of the request that begins there."""
        tokens = _as_tokens(input_tokens)
        bounds = as_bounds("query_start_loc", query_start_loc, len(tokens))
        tenants = [b""] * (len(bounds) - 1) if namespaces is None else as_list("namespaces", namespaces)
        if len(tenants) != len(bounds) - 1:
            raise ValueError(f"namespaces must be one for each of {len(bounds) - 1} requests, got {len(tenants)}")
        for tenant in tenants:
            check_namespace(tenant)
        ranges = [
            (begin + first, begin + last, tenant)
            for begin, end, tenant in zip(bounds, bounds[1:], tenants, strict=False)
            for first, last in _pairs(cuts(tokens[begin:end], begin))
        ]
        fetches: dict[tuple[bytes, bytes], Future[Segment | None]] = {}
        fetched = []
        for begin, end, tenant in ranges:
            key = tenant, tokens[begin:end].tobytes()
            if key not in fetches:
                fetches[key] = self._threads.submit(self._source.get, tokens[begin:end].copy(), tenant)
            fetched.append(SegmentFetch(begin, end, fetches[key]))
        return SegmentRetrieverTask(fetched, len(tokens), self._token_dim, self._device, self._place)


class SPTBlendRetriever(_SegmentRetriever):
    """Segments end with a separator of one or more tokens ("special tokens").

    spt: the separator's tokens. namespace: where a plain KVStore has the segments; by default b"blend", so that
        segments, which were computed with nothing before them, are told from the beginnings of prompts; b"" finds
        segments that `store(tokens, kv)` keeps. The other arguments: see _SegmentRetriever.

    A result in which nothing was found names in `reason` the places that were searched.
    """

    def __init__(
        self,
        spt: Tokens,
        cache_engine: KVStore | SegmentStore | SegmentSource,
        metadata: KVStoreMetadata,
        device: torch.device | str = "cpu",
        num_threads: int = 4,
        namespace: bytes | None = None,
    ) -> None:
        self._separator = as_tokens(spt, "spt").copy()
        if not len(self._separator):
            raise ValueError("spt must have at least one token, got none")
        super().__init__(cache_engine, metadata, device, num_threads, namespace)

    def new_request(
        self,
        input_tokens: torch.Tensor,
        query_start_loc: torch.Tensor,
        namespaces: Sequence[bytes] | None = None,
    ) -> SegmentRetrieverTask:
        """Begin to fetch the segments of requests, and return at once.

        Args:
            input_tokens: integers [num_tokens], of several requests one after the other.
            query_start_loc: [num_requests + 1], the first token of each request, and the end.
            namespaces: the tenant's name of each request; None for none.

        Returns:
            The task, which waits for the segments.

        Raises:
            ValueError, TypeError: arguments do not fit together, or are of the wrong type.
        """
        cut = cut_after_separators
        return self._begin(input_tokens, query_start_loc, namespaces, lambda part, _: cut(part, self._separator))


class SegmentBlendRetriever(_SegmentRetriever):
    """Segments without separators: the caller names where they begin, or the contents of the text decide.

    boundaries: how contents decide. The other arguments: see _SegmentRetriever; a SegmentStore compares every token
    that it finds.
    """

    def __init__(
        self,
        cache_engine: SegmentStore | SegmentSource,
        metadata: KVStoreMetadata,
        boundaries: ContentBoundaries | None = None,
        device: torch.device | str = "cpu",
        num_threads: int = 4,
    ) -> None:
        if isinstance(cache_engine, KVStore):
            raise TypeError("cache_engine must compare tokens as a SegmentStore does, got a KVStore")
        self._contents = boundaries or ContentBoundaries()
        super().__init__(cache_engine, metadata, device, num_threads)

    def new_request(
        self,
        input_tokens: torch.Tensor,
        query_start_loc: torch.Tensor,
        namespaces: Sequence[bytes] | None = None,
        boundaries: Sequence[int] | None = None,
    ) -> SegmentRetrieverTask:
        """Begin to fetch the segments of requests, and return at once.

        Args:
            input_tokens: integers [num_tokens], of several requests one after the other.
            query_start_loc: [num_requests + 1], the first token of each request, and the end.
            namespaces: the tenant's name of each request; None for none.
            boundaries: ascending, in [0, num_tokens]: the tokens at which segments begin or end. Boundaries of requests
                may be left out. None: contents decide.

        Returns:
            The task, which waits for the segments.

        Raises:
            ValueError, TypeError: arguments do not fit together, or are of the wrong type.
        """
        if boundaries is None:
            return self._begin(input_tokens, query_start_loc, namespaces, lambda part, _: self._contents.cuts(part))
        named = [as_integer("boundaries", boundary) for boundary in as_list("boundaries", boundaries)]
        num_tokens = len(_as_tokens(input_tokens))
        if named != sorted(set(named)) or (named and not 0 <= named[0] <= named[-1] <= num_tokens):
            raise ValueError(f"boundaries must ascend in [0, {num_tokens}], got {named}")
        return self._begin(
            input_tokens, query_start_loc, namespaces, lambda part, begin: named_cuts(named, begin, begin + len(part))
        )


def _as_tokens(tokens: torch.Tensor) -> npt.NDArray[np.int32]:
    """Return tokens of an array or of a tensor on any device. Raises TypeError or ValueError for other values."""
    return as_tokens(as_numbers("input_tokens", tokens).cpu() if isinstance(tokens, torch.Tensor) else tokens)


def _pairs(cuts: list[int]) -> list[tuple[int, int]]:
    return list(zip([0, *cuts], cuts, strict=False))
