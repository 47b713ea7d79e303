"""Retrievers over a plain store: in which namespace, with which heads, and why nothing was found."""

import pytest
import torch

from kvpage.blend import RotaryTables, SegmentStore
from kvpage.integrations.lmcache import CacheBlendImpl, SPTBlendRetriever
from kvpage.integrations.lmcache.interfaces import BlendRetrieverResult
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata

L, H, D, C = 3, 2, 8, 4
ONE, TWO = [5, 6, 7, 1], [8, 9, 1]
FMTS = pytest.mark.parametrize("fmt", ["vllm", "huggingface"])


def make(fmt: str = "vllm", dtype: torch.dtype | None = torch.float32) -> KVStore:
    config = KVStoreConfig(chunk_size=C, tiers=("memory://?size=8MiB",), num_threads=1)
    return KVStore(config, KVStoreMetadata("m", fmt=fmt, kv_dtype=dtype))


def kv_of(num_tokens: int, fmt: str = "vllm", parts: int = 2) -> torch.Tensor:
    kv = torch.randn(L, parts, num_tokens, H, D)
    return kv if fmt == "vllm" else kv.transpose(2, 3).contiguous()


def ask(store, tokens: list[int], tenant: bytes = b"", metadata=None, **options) -> BlendRetrieverResult:
    metadata = metadata or (store.store if isinstance(store, SegmentStore) else store).metadata
    with SPTBlendRetriever([1], store, metadata, **options) as retriever:
        return retriever.new_request(torch.tensor(tokens), torch.tensor([0, len(tokens)]), [tenant]).result(0)


@pytest.mark.parametrize("namespace", [None, b"", b"mine"])
@pytest.mark.parametrize("tenant", [b"", b"tenant"])
def test_segments_are_looked_for_where_the_caller_says(namespace: bytes | None, tenant: bytes) -> None:
    store, kv = make(), kv_of(len(ONE))
    place = b"blend" if namespace is None else namespace
    store.store(ONE, kv, namespace=place + tenant)
    for other in (None, b"", b"mine"):
        found = ask(store, ONE + TWO, tenant, namespace=other)
        if other == namespace:
            assert torch.equal(found.k[:4], kv[0, 0].flatten(1)) and found.reason is None
            assert found.valid_mask.tolist() == [True] * 4 + [False] * 3
        else:
            asked = b"blend" if other is None else other
            assert found.k is None and not found.valid_mask.any() and found.head_shape is None
            assert found.reason.startswith(f"of 2 segments none is in namespace {asked!r} of the store")
            assert "give the retriever the namespace that they are in" in found.reason
            assert found.k_heads is None and found.v_heads is None


def test_why_nothing_was_found_elsewhere() -> None:
    segments = SegmentStore(make())
    assert ask(segments, TWO).reason == "of 1 segments none is in the SegmentStore"
    assert ask(segments, []).reason == "there are no segments, since no tokens were given"
    segments.put(TWO, kv_of(3), range(3), is_standalone=True)
    assert ask(segments, TWO).reason is None


@pytest.mark.parametrize("namespace, error", [("blend", TypeError), (b"x" * 70_000, ValueError)])
def test_what_is_no_namespace(namespace, error: type) -> None:
    with pytest.raises(error, match="namespace must be"):
        ask(make(), ONE, namespace=namespace)


def test_a_namespace_is_for_plain_stores_alone() -> None:
    with pytest.raises(ValueError, match="namespace must be None but for a KVStore, got b'mine'"):
        ask(SegmentStore(make()), ONE, namespace=b"mine")


@FMTS
def test_results_keep_the_heads(fmt: str) -> None:
    store, kv = make(fmt), kv_of(len(ONE), fmt)
    store.store(ONE, kv, namespace=b"blend")
    found = ask(store, TWO + ONE)
    rows = kv[0] if fmt == "vllm" else kv[0].transpose(1, 2)
    assert found.head_shape == (H, D) and found.k.shape == found.v.shape == (7, H * D)
    assert torch.equal(found.k_heads[3:], rows[0]) and torch.equal(found.v_heads[3:], rows[1])
    assert found.k_heads.data_ptr() == found.k.data_ptr() and found.k_heads.shape == (7, H, D)


@FMTS
def test_latents_by_head(fmt: str) -> None:
    store, kv = make(fmt), kv_of(len(ONE), fmt, parts=1)
    store.store(ONE, kv, namespace=b"blend")
    found = ask(store, ONE)
    assert found.k_heads.shape == (4, H, D) and found.v_heads.shape == (4, H, 0)


def test_rows_of_an_unknown_shape() -> None:
    rows = torch.zeros(3, 8)
    result = BlendRetrieverResult(rows, rows, torch.ones(3, dtype=torch.bool), torch.arange(3))
    with pytest.raises(ValueError, match="head_shape must be known"):
        _ = result.k_heads


def test_heads_are_blended_as_rows_are() -> None:
    store, kv = make(), kv_of(len(ONE))
    store.store(ONE, kv, namespace=b"blend")
    tables = RotaryTables.of_frequencies(10000.0 ** -(torch.arange(0, D, 2) / D), D)
    flat, heads = CacheBlendImpl(0.25, rotary=tables), CacheBlendImpl(0.25, rotary=tables)
    bounds, positions, fresh = torch.tensor([0, 4]), torch.arange(4), torch.randn(4, H * D)
    metadata = store.metadata
    with SPTBlendRetriever([1], store, metadata) as retriever:
        task = retriever.new_request(torch.tensor(ONE), bounds)
        for layer in range(L):
            found = task.result(layer)
            rest = found.valid_mask, found.original_positions
            one = flat.blend(layer, found.k, found.v, *rest, fresh, fresh, fresh, positions, bounds)
            split = fresh.view(len(fresh), H, D)
            two = heads.blend(
                layer, found.k_heads, found.v_heads, *rest, split, split, split, positions, bounds, token_dim=0
            )
            assert torch.equal(two.k.flatten(1), one.k) and torch.equal(two.v.flatten(1), one.v)
            fresh, positions = fresh[one.local_indices], one.positions


def test_a_store_that_learned_its_dtype() -> None:
    store, kv = make(dtype=None), kv_of(len(ONE))
    given = store.metadata
    segments = SegmentStore(store)
    assert ask(store, ONE).reason is not None
    segments.put(ONE, kv, range(4), is_standalone=True)
    for metadata in (given, store.metadata):
        assert torch.equal(ask(segments, ONE, metadata=metadata).k, kv[0, 0].flatten(1))
    with pytest.raises(ValueError, match="metadata must be the store's"):
        ask(segments, ONE, metadata=KVStoreMetadata("m", kv_dtype=torch.float16))
