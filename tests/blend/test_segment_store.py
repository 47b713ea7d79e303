"""Segments come back bit by bit with their positions, the standalone ones first, and nothing else comes back."""

import pytest
import torch

from kvpage.blend import SegmentStore
from kvpage.blend.segment_store import Kind, segment_namespace
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata

L, H, D, C = 2, 3, 8, 4
FMTS = pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def make(fmt="vllm", dtype=torch.float32, tiers=("memory://?size=4MiB",), **config):
    config = KVStoreConfig(chunk_size=C, tiers=tiers, num_threads=1, **config)
    return KVStore(config, KVStoreMetadata("m", fmt=fmt, kv_dtype=dtype))


def kv_of(num_tokens, fmt="vllm", dtype=torch.float32, parts=2):
    kv = torch.randn(L, parts, num_tokens, H, D).to(dtype)
    return kv if fmt == "vllm" else kv.transpose(2, 3).contiguous()


def leading(kv, fmt, count):
    return kv.narrow(2 if fmt == "vllm" else 3, 0, count)


def same(segment, kv, positions, is_standalone):
    assert segment is not None
    assert torch.equal(segment.kv.contiguous().view(torch.uint8), kv.contiguous().view(torch.uint8))
    assert segment.positions.dtype == torch.int64 and segment.positions.tolist() == list(positions)
    assert segment.is_standalone == is_standalone and segment.num_tokens == len(positions)


@FMTS
@DTYPES
@pytest.mark.parametrize("num_tokens", [0, 1, C - 1, C, C + 1, 3 * C + 2])
@pytest.mark.parametrize("is_standalone", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_what_is_put_is_got(fmt, dtype, num_tokens, is_standalone, parts):
    tokens, kv = list(range(50, 50 + num_tokens)), kv_of(num_tokens, fmt, dtype, parts)
    kv.view(torch.uint8).flatten()[: 4 * D] = 0xFF  # NaNs keep their bits
    positions = torch.arange(num_tokens) * 3 + 2**40
    with make(fmt, dtype) as store:
        segments = SegmentStore(store)
        count = segments.put(tokens, kv, positions, is_standalone).result()
        assert count == -(-num_tokens // C)
        assert segments.lookup(tokens) == num_tokens
        if not num_tokens:
            assert segments.get(tokens) is None
            return
        same(segments.get(tokens), kv, positions.tolist(), is_standalone)
        longer = segments.get([*tokens, 9, 9, 9, 9, 9])  # the last chunk of the shorter one is another one
        whole = num_tokens // C * C
        if whole:
            same(longer, leading(kv, fmt, whole), positions.tolist()[:whole], is_standalone)
        else:
            assert longer is None
        assert segments.get(tokens, b"other tenant") is None and segments.lookup(tokens, b"other tenant") == 0
        assert store.lookup(tokens) == 0, "an exact lookup finds no segment"
        first = segments.get(tokens)
        first.kv.zero_(), first.positions.zero_()
        same(segments.get(tokens), kv, positions.tolist(), is_standalone)
        segments.remove(tokens)
        assert segments.get(tokens) is None


@FMTS
def test_standalone_is_preferred_and_the_longer_run_before(fmt):
    tokens = list(range(3 * C))
    context, alone = kv_of(3 * C, fmt), kv_of(3 * C, fmt)
    with make(fmt) as store:
        segments = SegmentStore(store)
        assert segments.put(tokens, context, range(100, 112), False).result() == 3
        same(segments.get(tokens), context, range(100, 112), False)
        segments.put(tokens[: 2 * C], leading(alone, fmt, 2 * C), range(2 * C), True)
        same(segments.get(tokens), context, range(100, 112), False)
        same(segments.get(tokens[: 2 * C]), leading(alone, fmt, 2 * C), range(2 * C), True)
        segments.put(tokens, alone, range(3 * C), True)
        same(segments.get(tokens), alone, range(3 * C), True)
        assert segments.put(tokens, context, range(7, 19), False).result() == 0
        other = [5, *tokens]
        segments.put(other, kv_of(len(other), fmt), range(len(other)), True)
        assert segments.put(other, kv_of(len(other), fmt), range(len(other)), False).result() == 0


def test_positions_that_are_none_of_the_first_segments():
    """Chunks that two segments share keep the positions of whoever came first; each token has its own."""
    first, second = [1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7]
    kvs = kv_of(5), kv_of(6)
    with make() as store:
        segments = SegmentStore(store)
        segments.put(first, kvs[0], range(10, 15), False)
        segments.put(second, kvs[1], range(70, 76), False)
        mixed = torch.cat([kvs[0][:, :, :4], kvs[1][:, :, 4:]], dim=2)
        same(segments.get(second), mixed, [10, 11, 12, 13, 74, 75], False)


def test_records_that_name_other_tokens_are_not_taken():
    """As if two token sequences had one digest: every token is compared."""
    tokens, kv = list(range(2 * C)), kv_of(2 * C)
    with make() as store, make() as other:
        segments = SegmentStore(store)
        SegmentStore(other).put(tokens, kv, range(2 * C), True)
        whole, _ = other.retrieve(tokens, return_tuple=False, namespace=segment_namespace(b"", Kind.STANDALONE))
        for wrong, kept in ((0, 0), (C, C), (C + 1, C + 1)):
            forged = whole.clone()
            ids = forged[-1, 0, :, 0].contiguous().view(torch.int64)
            ids[wrong, 1] = 999
            forged[-1, 0, :, 0] = ids.view(torch.float32)
            store.clear()
            store.store(tokens, forged, namespace=segment_namespace(b"", Kind.STANDALONE))
            found = segments.get(tokens)
            if kept:
                same(found, kv[:, :, :kept], range(kept), True)
            else:
                assert found is None


def test_bad_arguments_store_nothing():
    tokens, kv = list(range(5)), kv_of(5)
    with make() as store:
        segments = SegmentStore(store)
        for error, message, args in (
            (ValueError, "positions must be of 5 tokens, got 4", (tokens, kv, range(4), True)),
            (ValueError, "positions must not be negative, got -1", (tokens, kv, [0, 1, -1, 2, 3], True)),
            (ValueError, "positions must be integers", (tokens, kv, torch.zeros(5), True)),
            (ValueError, "positions must be integers", (tokens, kv, torch.zeros(5, 1, dtype=torch.int64), True)),
            (ValueError, "kv must be of 5 tokens, got 4", (tokens, kv[:, :, :4], range(5), True)),
            (ValueError, "kv must have heads of at least 16 bytes", (tokens, kv[..., :3], range(5), True)),
            (ValueError, "kv_tensors must be of torch.float32", (tokens, kv.half(), range(5), True)),
            (TypeError, "namespace must be bytes", (tokens, kv, range(5), True, "tenant")),
        ):
            with pytest.raises(error, match=message):
                segments.put(*args)
        assert store.stats().stored_chunks == 0
        with pytest.raises(TypeError, match="namespace must be bytes"):
            segments.get(tokens, "tenant")
    with pytest.raises(ValueError, match="the store is closed"):
        segments.get(tokens)
    with make(dtype=torch.bfloat16, codec="fp8") as lossy, pytest.raises(ValueError, match="codec must be lossless"):
        SegmentStore(lossy)
