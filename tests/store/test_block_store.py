"""BlockStore: three methods make a store that an engine can ask. The others have defaults, or refuse."""

import numpy as np
import pytest
from support.dict_store import CHUNK, B, DictStore
from support.store_engines import all_bytes, make_engine
from support.store_states import LAYOUT

from kvpage.store import BlockStore
from kvpage.store.block_store import check_store, is_count

BLOCKS = np.arange(8, dtype=np.int32)


@pytest.mark.parametrize("num_tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, 8 * B])
def test_three_methods_make_a_store(num_tokens: int) -> None:
    source, target, tokens = make_engine(seed=1), make_engine(seed=2), np.arange(num_tokens, dtype=np.int32)
    store, told = DictStore(), []
    whole = num_tokens // CHUNK * CHUNK
    assert store.store_blocks(tokens, source, BLOCKS, namespace=b"") == whole
    explanation = store.explain(tokens)
    assert (explanation.num_tokens, explanation.num_cached_tokens, explanation.groups) == (num_tokens, whole, ())
    expected = make_engine(seed=2)
    store.load_blocks(tokens, expected, BLOCKS, start=0, namespace=b"")
    end = store.load_early(tokens, target, BLOCKS, lambda *verified: told.append(verified), start=0, namespace=b"")
    assert end == whole and not told
    assert all((a == b).all() for a, b in zip(all_bytes(target), all_bytes(expected), strict=True))
    store.check_engine(source)
    assert store.prefetch(tokens) == 0 and store.metadata is None and store.config is None
    assert not store.groups and not store.waits_for_others


def test_finish_blocks_stores() -> None:
    store, tokens = DictStore(), np.arange(CHUNK, dtype=np.int32)
    has_first = np.array([True])
    assert store.finish_blocks(tokens, make_engine(), BLOCKS, namespace=b"", has_first=has_first) == CHUNK
    assert store.calls == ["store"]


def test_what_a_store_cannot_keep_is_refused() -> None:
    with pytest.raises(ValueError, match="store must keep states .*, got DictStore: its chunks hold K and V alone"):
        DictStore().states(LAYOUT)
    with pytest.raises(ValueError, match="store must keep groups of layers apart .*, got DictStore"):
        DictStore().layers(make_engine())


def test_stores_and_their_answers_are_told_from_others() -> None:
    check_store(DictStore())
    for wrong in (object(), None, DictStore):
        with pytest.raises(TypeError, match="store must derive from kvpage.store.BlockStore, got"):
            check_store(wrong)
    with pytest.raises(TypeError, match="abstract"):
        BlockStore()
    assert all(map(is_count, (0, 7, np.int64(3)))) and not any(map(is_count, (-1, True, "3", 2.5, None)))
