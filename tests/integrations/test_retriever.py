"""Retrievers against a loop over segments, and boundaries against one over tokens."""

import random
import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch

from kvpage.blend import ContentBoundaries, RotaryTables, SegmentStore
from kvpage.blend.boundaries import _window_hashes
from kvpage.integrations.lmcache import CacheBlendImpl, SegmentBlendRetriever, SPTBlendRetriever
from kvpage.integrations.lmcache.cuts import cut_after_separators
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata

L, H, D, C = 3, 2, 8, 4
META = {fmt: KVStoreMetadata("m", fmt=fmt, kv_dtype=torch.float32) for fmt in ("vllm", "huggingface")}
FMTS = pytest.mark.parametrize("fmt", list(META))


def make(fmt="vllm"):
    return KVStore(KVStoreConfig(chunk_size=C, tiers=("memory://?size=8MiB",), num_threads=1), META[fmt])


def kv_of(num_tokens, fmt, parts=2):
    kv = torch.randn(L, parts, num_tokens, H, D)
    return kv if fmt == "vllm" else kv.transpose(2, 3).contiguous()


def rows_of(kv, layer, part, fmt):
    rows = kv[layer, part]
    return (rows if fmt == "vllm" else rows.transpose(0, 1)).reshape(-1, H * D)


def request(*parts):
    bounds = np.cumsum([0, *map(len, parts)])
    return torch.tensor([token for part in parts for token in part], dtype=torch.int64), torch.tensor(bounds)


# --- boundaries ------------------------------------------------------------------------------------------------------


def naive_cuts(tokens, separator):
    cuts, at = [], 0
    while at < len(tokens):
        if tokens[at : at + len(separator)] == separator:
            at += len(separator)
            cuts.append(at)
        else:
            at += 1
    return cuts if cuts[-1:] == [len(tokens)] or not tokens else [*cuts, len(tokens)]


@pytest.mark.parametrize("separator", [[1], [1, 1], [1, 2], [1, 2, 1], [1, 1, 1]])
def test_separators_cut_as_a_loop_does(separator):
    rng = random.Random(0)
    texts = [[rng.choice([1, 2, 3]) for _ in range(rng.randrange(0, 12))] for _ in range(300)]
    for tokens in [[], [1], [1, 1], [1, 1, 1], [1, 1, 1, 1], separator, [*separator, *separator], *texts]:
        found = cut_after_separators(np.array(tokens, np.int32), np.array(separator, np.int32))
        assert found == naive_cuts(tokens, separator), tokens


def naive_content_cuts(tokens, how):
    array, n = np.array(tokens, np.int32), len(tokens)
    hashes = {
        end: int(_window_hashes(array[end - how.window : end], how.window)[0]) for end in range(how.window, n + 1)
    }
    radius, cuts = how.min_length - 1, []
    for end in hashes:
        near = [end + step for step in range(-radius, radius + 1) if step]
        if all(one in hashes and hashes[one] < hashes[end] for one in near):
            cuts.append(end)
    whole = [*cuts, n] if n and cuts[-1:] != [n] else cuts
    out, begin = [], 0
    for end in whole:
        count = -(-(end - begin) // how.max_length)
        out += [begin + (end - begin) * part // count for part in range(1, count + 1)]
        begin = end
    return out


@pytest.mark.parametrize("how", [ContentBoundaries(1, 2, 4), ContentBoundaries(3, 4, 11), ContentBoundaries(8, 3, 64)])
def test_contents_cut_as_a_loop_does(how):
    rng = random.Random(1)
    for length in [0, 1, 2, 3, how.window, how.window + 2 * how.min_length - 2, 60, 200]:
        for tokens in ([rng.randrange(50) for _ in range(length)], [7] * length, [length % 2, 5] * (length // 2)):
            cuts = how.cuts(np.array(tokens, np.int32))
            assert cuts == naive_content_cuts(tokens, how)
            lengths = np.diff([0, *cuts])
            assert sum(lengths) == len(tokens) and all(0 < each <= how.max_length for each in lengths)


def test_a_text_has_the_same_boundaries_wherever_it_stands():
    rng, how = np.random.default_rng(2), ContentBoundaries(8, 16, 4096)
    text = rng.integers(0, 32000, 2000, dtype=np.int32)
    inner = []
    for before in (0, 1, 37, 500):
        whole = np.concatenate([rng.integers(0, 32000, before), text, rng.integers(0, 32000, before // 2)])
        cuts = [cut - before for cut in how.cuts(whole.astype(np.int32))]
        inner.append([cut for cut in cuts if how.window + how.min_length <= cut <= len(text) - how.min_length])
    assert all(cuts == inner[0] for cuts in inner)
    assert 1.5 * how.min_length < len(text) / len(inner[0]) < 3 * how.min_length
    assert min(np.diff(inner[0])) >= how.min_length
    assert _window_hashes(text[:9], 8).tolist()[1] == _window_hashes(text[1:9], 8).tolist()[0]


def test_bad_boundaries():
    for fields, message in (
        ({"window": 0}, "window must be an integer of at least 1, got 0"),
        ({"min_length": 1}, "min_length must be an integer of at least 2"),
        ({"min_length": 64, "max_length": 127}, "max_length must be an integer of at least 128"),
        ({"window": True}, "window must be an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            ContentBoundaries(**fields)
    with pytest.raises(ValueError, match="separator must have at least one token"):
        cut_after_separators(np.array([1], np.int32), np.array([], np.int32))


# --- retrieval -------------------------------------------------------------------------------------------------------


def check(task, tokens, segments, stored, fmt):
    """segments: (begin, end). stored: by tokens the K and V, the positions, how many of them were stored."""
    for layer in range(L):
        valid, positions = [False] * len(tokens), [0] * len(tokens)
        k, v = torch.zeros(2, len(tokens), H * D)
        for begin, end in segments:
            kv, at, count = stored.get(tuple(tokens[begin:end].tolist()), (None, None, 0))
            for i in range(count):
                valid[begin + i], positions[begin + i] = True, at[i]
                k[begin + i], v[begin + i] = (rows_of(kv, layer, part, fmt)[i] for part in (0, 1))
        result = task.result(layer)
        assert result.valid_mask.dtype == torch.bool and result.valid_mask.tolist() == valid
        assert result.original_positions.dtype == torch.int64 and result.original_positions.tolist() == positions
        if not any(valid):
            assert result.k is None and result.v is None
        else:
            assert torch.equal(result.k, k) and torch.equal(result.v, v)
            assert result.original_positions.device == result.k.device == result.valid_mask.device


@FMTS
@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("separator", [[900], [900, 901]])
def test_segments_are_found_wherever_they_stand(fmt, is_plain, separator):
    rng = random.Random(3)
    with make(fmt) as store:
        source, stored = (store if is_plain else SegmentStore(store)), {}
        for index, (length, share) in enumerate([(9, 1), (4, 1), (1, 1), (12, 0.5), (7, 0), (0, 1)]):
            segment = [100 * index + i for i in range(length)] + separator
            count = len(segment) if share == 1 else int(len(segment) * share) // C * C
            kv, at = kv_of(len(segment), fmt), list(range(len(segment)))
            part = kv.narrow(2 if fmt == "vllm" else 3, 0, count)
            if is_plain:
                store.store(segment[:count], part, namespace=b"blend")
            else:
                at = [token * 5 + index for token in at]
                source.put(segment[:count], part, at[:count], False)
            stored[tuple(segment)] = kv, at, count
        known = [list(segment) for segment in stored]
        with SPTBlendRetriever(separator, source, META[fmt], num_threads=3) as retriever:
            for _ in range(12):
                parts = [
                    [token for _ in range(rng.randrange(4)) for token in rng.choice(known)] + rng.choice([[], [55, 56]])
                    for _ in range(rng.randrange(1, 4))
                ]
                tokens, bounds = request(*parts)
                segments = []
                for begin, part in zip(bounds.tolist(), parts, strict=False):
                    cuts = naive_cuts(part, separator)
                    segments += [(begin + a, begin + b) for a, b in zip([0, *cuts], cuts, strict=False)]
                check(retriever.new_request(tokens, bounds), tokens, segments, stored, fmt)


@FMTS
def test_a_segment_does_not_cross_requests(fmt):
    segment, kv = [1, 2, 3, 4, 9], kv_of(5, fmt)
    with make(fmt) as store, SPTBlendRetriever([9], SegmentStore(store), META[fmt]) as retriever:
        SegmentStore(store).put(segment, kv, range(5), True)
        tokens, bounds = request([1, 2], [3, 4, 9], segment)
        result = retriever.new_request(tokens, bounds).result(0)
        assert result.valid_mask.tolist() == [False] * 5 + [True] * 5
        assert torch.equal(result.k[5:], rows_of(kv, 0, 0, fmt))


@pytest.mark.parametrize("parts", [[[]], [[], []], [[9]], [[9, 9, 9], []], [[1]]])
@pytest.mark.parametrize("separator", [[9], [9, 9], [9, 9, 9, 9]])
def test_hardly_any_tokens(parts, separator):
    with make() as store, SPTBlendRetriever(separator, store, META["vllm"]) as retriever:
        tokens, bounds = request(*parts)
        for layer in (0, 99):
            result = retriever.new_request(tokens, bounds).result(layer)
            assert result.k is None and result.v is None
            assert result.valid_mask.tolist() == [False] * len(tokens) == [bool(at) for at in result.original_positions]
        store.store(separator, kv_of(len(separator), "vllm"), namespace=b"blend")
        result = retriever.new_request(torch.tensor(separator), torch.tensor([0, len(separator)])).result(2)
        assert result.valid_mask.all() and result.k.shape == (len(separator), H * D)


def test_results_are_the_callers_own():
    tokens, bounds = request([1, 2, 3, 4])
    with make() as store, SPTBlendRetriever([9], SegmentStore(store), META["vllm"]) as retriever:
        SegmentStore(store).put([1, 2, 3, 4], kv_of(4, "vllm"), range(3, 7), True)
        task = retriever.new_request(tokens, bounds)
        first, kept = task.result(1), task.result(1)
        for part in (first.k, first.v, first.valid_mask, first.original_positions):
            part.zero_()
        again = task.result(1)
        for name in ("k", "v", "valid_mask", "original_positions"):
            assert torch.equal(getattr(again, name), getattr(kept, name))
        for wrong in (-1, L):
            with pytest.raises(ValueError, match=r"layer_id must be in \[0, 3\)"):
                task.result(wrong)
        given = tokens.int()
        task = retriever.new_request(given, bounds.int())
        given.fill_(7)
        assert task.result(0).valid_mask.all()


@FMTS
def test_what_is_retrieved_is_blended(fmt):
    """Two segments in the other order than they were computed in: K comes out as if computed where it stands now."""
    tables = RotaryTables.of_frequencies(100.0 ** -(torch.arange(0, D, 2) / D), D)
    texts, bare = ([1, 2, 3, 9], [4, 5, 6, 7, 9]), torch.randn(L, 2, 9, H, D)  # K before it is rotated

    def at(rows, positions):
        return tables.rotate(rows, torch.zeros_like(positions), positions)

    with make(fmt) as store, SPTBlendRetriever([9], SegmentStore(store), META[fmt]) as retriever:
        for text, begin in zip(texts, (0, 4), strict=True):
            place = torch.arange(begin, begin + len(text))
            kv = torch.stack([torch.stack([at(k[place], place), v[place]]) for k, v in bare])
            SegmentStore(store).put(text, kv if fmt == "vllm" else kv.transpose(2, 3), place, begin == 0)
        tokens, bounds = request([*texts[1], *texts[0], 70, 71])
        task, new = retriever.new_request(tokens, bounds), torch.arange(11)
        executor, rows, fresh = CacheBlendImpl(0.0, rotary=tables), new, torch.randn(11, H * D)
        for layer in range(L):
            found = task.result(layer)
            given = found.k, found.v, found.valid_mask, found.original_positions
            output = executor.blend(layer, *given, fresh[rows], fresh[rows], fresh[rows], new[rows], bounds)
            rows = output.local_indices if layer == 1 else rows
        order = [4, 5, 6, 7, 8, 0, 1, 2, 3]
        want = at(bare[2, 0][order], new[:9]).flatten(1), bare[2, 1][order].flatten(1)
        torch.testing.assert_close(output.k[:9], want[0], rtol=1e-4, atol=1e-5)
        assert torch.equal(output.v[:9], want[1]) and rows.tolist() == [9, 10]
        assert torch.equal(output.k[9:], fresh[9:]) and torch.equal(output.v[9:], fresh[9:])


def test_latents_have_no_values():
    kv = torch.randn(L, 1, 5, 1, D)
    with make() as store, SPTBlendRetriever([9], SegmentStore(store), META["vllm"]) as retriever:
        SegmentStore(store).put([1, 2, 3, 4, 5], kv, range(5), True)
        tokens, bounds = request([1, 2, 3, 4, 5])
        result = retriever.new_request(tokens, bounds).result(2)
        assert torch.equal(result.k, kv[2, 0].flatten(1)) and result.v.shape == (5, 0)


class Held:
    """A source that waits, counts its calls, and may fail."""

    def __init__(self, error=None):
        self.go, self.calls, self.error, self.lock = threading.Event(), [], error, threading.Lock()

    def get(self, tokens, namespace=b""):
        with self.lock:
            self.calls.append((namespace, tuple(tokens.tolist())))
        assert self.go.wait(120)
        if self.error:
            raise self.error


def test_retrieval_is_asynchronous_and_fetches_a_segment_once():
    source = Held()
    with SPTBlendRetriever([9], source, META["vllm"], num_threads=2) as retriever:
        tokens, bounds = request([1, 9, 2, 9, 1, 9], [1, 9], [1, 9])
        task = retriever.new_request(tokens, bounds, [b"a", b"a", b"b"])  # returns although nothing can be fetched
        waiting = threading.Thread(target=task.result, args=(0,))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        source.go.set()
        waiting.join(120)
        assert not waiting.is_alive() and task.result(0).k is None
        assert sorted(source.calls) == [(b"a", (1, 9)), (b"a", (2, 9)), (b"b", (1, 9))]


def test_no_empty_segment_is_asked_for():
    source = Held()
    source.go.set()
    with SegmentBlendRetriever(source, META["vllm"]) as retriever:
        tokens, bounds = request([1, 2, 3], [], [4, 5])
        assert retriever.new_request(tokens, bounds, boundaries=[0, 1, 3, 5]).result(0).k is None
    assert sorted(tokens for _, tokens in source.calls) == [(1,), (2, 3), (4, 5)]


def test_errors_of_the_store_reach_the_result():
    source = Held(OSError("the disk is gone"))
    source.go.set()
    tokens, bounds = request([1, 9])
    with SPTBlendRetriever([9], source, META["vllm"]) as retriever:
        task = retriever.new_request(tokens, bounds)
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                task.result(0)
    store = make()
    with SPTBlendRetriever([9], SegmentStore(store), META["vllm"]) as retriever:
        store.close()
        with pytest.raises(ValueError, match="the store is closed"):
            retriever.new_request(tokens, bounds).result(0)


def test_closing_cancels_what_has_not_begun():
    source = Held()
    retriever = SPTBlendRetriever([9], source, META["vllm"], num_threads=1)
    tokens, bounds = request([1, 9, 2, 9])
    task = retriever.new_request(tokens, bounds)
    while not source.calls:
        pass
    threading.Timer(0.05, source.go.set).start()
    retriever.close(), retriever.close()
    with pytest.raises(CancelledError):
        task.result(0)
    assert len(source.calls) == 1


def test_tenants_do_not_see_each_other():
    kv = kv_of(4, "vllm")
    with make() as store, SegmentBlendRetriever(SegmentStore(store), META["vllm"]) as retriever:
        SegmentStore(store).put([1, 2, 3, 4], kv, range(4), True, b"a")
        tokens, bounds = request([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4])
        result = retriever.new_request(tokens, bounds, [b"b", b"a", b""]).result(0)
        assert result.valid_mask.tolist() == [False] * 4 + [True] * 4 + [False] * 4


@FMTS
def test_segments_without_separators(fmt):
    """Named: found at other offsets. By contents: all but the ends of a text that moved are found again."""
    rng, how = np.random.default_rng(4), ContentBoundaries(4, 8, 64)
    text = rng.integers(0, 1000, 200).tolist()
    with make(fmt) as store, SegmentBlendRetriever(SegmentStore(store), META[fmt], how) as retriever:
        segments = SegmentStore(store)
        whole, stored = kv_of(200, fmt), {}
        dim = 2 if fmt == "vllm" else 3
        cuts = how.cuts(np.array(text, np.int32))
        for begin, end in zip([0, *cuts], cuts, strict=False):
            part, at = whole.narrow(dim, begin, end - begin), list(range(begin, end))
            segments.put(text[begin:end], part, at, False)
            stored[tuple(text[begin:end])] = part, at, end - begin
        tokens, bounds = request([1] * 13 + text + [2] * 5, text)
        pieces = []
        for begin, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
            inner = how.cuts(tokens[begin:end].int().numpy())
            pieces += [(begin + a, begin + b) for a, b in zip([0, *inner], inner, strict=False)]
        task = retriever.new_request(tokens, bounds)
        valid = task.result(0).valid_mask
        assert valid[218:].all() and valid[:218].sum() > 120
        assert torch.equal(task.result(0).k[218:], rows_of(whole, 0, 0, fmt))
        moved = valid[:218].nonzero().flatten()
        assert torch.equal(task.result(2).v[moved], rows_of(whole, 2, 1, fmt)[moved - 13])
        assert torch.equal(task.result(0).original_positions[moved], moved - 13)

        alone = kv_of(6, fmt)
        segments.put([5, 6, 7, 8, 9, 9], alone, range(40, 46), True)
        tokens, bounds = request([3, 5, 6, 7, 8, 9, 9, 4], [5, 6, 7, 8, 9, 9])
        result = retriever.new_request(tokens, bounds, boundaries=[1, 7]).result(1)
        assert result.valid_mask.tolist() == [False] + [True] * 6 + [False] + [True] * 6
        for begin in (1, 8):
            assert torch.equal(result.k[begin : begin + 6], rows_of(alone, 1, 0, fmt))
            assert result.original_positions[begin : begin + 6].tolist() == list(range(40, 46))
        assert (
            retriever.new_request(tokens, bounds, boundaries=[]).result(0).valid_mask.tolist()
            == [False] * 8 + [True] * 6
        )


def test_bad_requests():
    with make() as store:
        segments = SegmentStore(store)
        other = KVStoreMetadata("other", kv_dtype=torch.float32)
        for error, message, build in (
            (ValueError, "spt must have at least one token", lambda: SPTBlendRetriever([], store, META["vllm"])),
            (ValueError, "metadata must be the store's", lambda: SPTBlendRetriever([1], store, other)),
            (ValueError, "metadata must be the store's", lambda: SPTBlendRetriever([1], segments, other)),
            (
                ValueError,
                "num_threads must be at least 1",
                lambda: SPTBlendRetriever([1], store, META["vllm"], "cpu", 0),
            ),
            (TypeError, "must compare tokens", lambda: SegmentBlendRetriever(store, META["vllm"])),
        ):
            with pytest.raises(error, match=message):
                build()
        tokens, bounds = request([1, 2, 3])
        with SegmentBlendRetriever(segments, META["vllm"]) as retriever:
            for error, message, args in (
                (ValueError, r"query_start_loc must ascend from 0 to 3, got \[0, 2\]", (tokens, torch.tensor([0, 2]))),
                (ValueError, "query_start_loc must ascend", (tokens, torch.tensor([1, 3]))),
                (ValueError, "query_start_loc must ascend", (tokens, torch.tensor([0, 4, 3]))),
                (ValueError, "query_start_loc must ascend", (tokens, torch.tensor([], dtype=torch.int64))),
                (ValueError, "tokens must be integers", (tokens.float(), bounds)),
                (ValueError, "tokens must be one-dimensional", (tokens[None], bounds)),
                (ValueError, "namespaces must be one for each of 1 requests, got 2", (tokens, bounds, [b"", b""])),
                (TypeError, "namespace must be bytes", (tokens, bounds, ["tenant"])),
                (ValueError, r"boundaries must ascend in \[0, 3\]", (tokens, bounds, None, [2, 1])),
                (ValueError, r"boundaries must ascend in \[0, 3\]", (tokens, bounds, None, [1, 1])),
                (ValueError, r"boundaries must ascend in \[0, 3\]", (tokens, bounds, None, [4])),
            ):
                with pytest.raises(error, match=message):
                    retriever.new_request(*args)
        segments.put([1, 2, 3, 4], kv_of(4, "vllm"), range(4), True)
        segments.put([5, 6, 7, 8], torch.randn(L + 1, 2, 4, H, D), range(4), True)
        with SPTBlendRetriever([4], segments, META["vllm"]) as retriever:
            task = retriever.new_request(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), torch.tensor([0, 8]))
            with pytest.raises(ValueError, match="all segments must be of one shape"):
                task.result(0)
