"""Events are vLLM's, field by field and byte by byte: beside a recording of vLLM 0.32, and beside vLLM where it is."""

import base64
import importlib.util
from dataclasses import fields, replace

import msgpack
import pytest
from support.mirror_router import MirrorRouter

from kvpage import BlockPool, PrefixTree
from kvpage.observe.events.block_events import BlockEvents
from kvpage.observe.events.schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    merge,
    pack,
    split,
    unpack,
)
from kvpage.observe.tree_watch import TreeWatch

BATCH = EventBatch(
    1.5,
    [
        BlockStored([2**64 - 1, 5], None, [7, 300], 1, None, "GPU", None, None, 0, "full_attention"),
        BlockStored([9], 5, [8], 1, None, "CPU", "a", [["a"]], 0, "mla_attention", 4, "LOCAL", "disk", "s"),
        BlockRemoved([5], "CPU", 0),
        BlockRemoved([5], "CPU", 0, "REMOTE", "disk"),
        AllBlocksCleared(),
    ],
    0,
)
# The same batch, as vLLM 0.32 encodes it.
RECORDED = base64.b85decode(
    "lgmH&00000005PWq;z?3WvfDLZ)0mybZ>HHWUOLrZ)0m;Xkl|`Wpk3x|NsC0|NsC01+j2pa%FCGUt(-;V{2b%VRLA}sdR5^Wo}<-WOI@S%>gW`"
    "Vr*|?YhQC|dSwBpY;SU5Uuk5(rfp?pX?1O*M^II%Y;SU5Uv6P-Wx%Ota&L8TUuk4`0J3X#Ut?ioXk}k>aAjj(YiVv|u4Z*?Y+qq?bY*UIX>V?i"
    "q;z?3WvfDLZ)0mybZ>HHWUOLrZ)0m;Xkl|`Wpj}Uv2bB>Wo~p|Vr*|?YhP$#b7%#rbZ={AZeM9+bCC$DVr*|?YhQC|dSwBpY;SU5Uuk5(rfp?p"
    "X?1O*Lr_(zY;SU5Uv6P-WualJWq5RQVP9)yd2^AGp<$_Ka&L8TUuk4`0J3X#Ut?ioXk}k>aAjj(YiVv|t!->!Utx4~Wo~q7Z*IJ6c3)#*V`ybx"
    "b8uy2Uvq3}WNB_^Uw3J4WN&u_sBCXzVQgu1d8JHGLqSZbZ+C8Ga&u^DaHM2ub8D(|Wpi_BZ*E^{WTA6}q;z?3WvoJMZ)0mxWo>VEWn`>kY;R+0"
    "Uua=-Xk~Me1*UCfWNCG6qeD<tsb_L;b#Py4WOx9Eq;z?3WvoJMZ)0mxWo>VEWn`>kY;R+0Uua=-Xk~Me1*UCfWNCG6qeD<tsb_L;b#Py4WOx9m"
    "Y;R*>Y-x0Prcy;sPgF&zZ+C8Ga&u^DaHM2ub8CU5ba`-Put98WLTqniYjZ<vWnpq<WB>"
)
OLD_STORED = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]


def test_the_recorded_bytes_are_ours():
    assert pack(BATCH) == RECORDED
    assert unpack(RECORDED) == BATCH


def test_all_fields_of_vllm_are_here_in_its_order():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; the recorded bytes have each field once")
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    decoded = msgspec.msgpack.Decoder(KVEventBatch).decode(pack(BATCH))
    assert (decoded.ts, decoded.data_parallel_rank) == (BATCH.ts, BATCH.data_parallel_rank)
    for theirs, ours in zip(decoded.events, BATCH.events, strict=True):
        assert type(theirs).__name__ == type(ours).__name__
        names = [field.name for field in fields(ours)]
        assert list(theirs.__struct_fields__) == names[: len(theirs.__struct_fields__)]  # 0.32 has one less
        for name in theirs.__struct_fields__:
            value = getattr(theirs, name)
            expected = getattr(ours, name)
            assert value == ([tuple(one) for one in expected] if name == "extra_keys" and expected else expected)
    assert msgspec.msgpack.encode(decoded) == pack(BATCH)


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_consumers_of_older_schemas_find_their_fields_where_they_were(encoding):
    _, events, _ = msgpack.unpackb(pack(BATCH, encoding))
    for wire, event in zip(events[:4], BATCH.events[:4], strict=True):
        names = OLD_STORED if isinstance(event, BlockStored) else OLD_STORED[:1] + ["medium"]
        found = [wire[name] for name in names] if encoding == "map" else wire[1 : len(names) + 1]
        assert found == [getattr(event, name) for name in names]
    assert unpack(pack(BATCH, encoding)) == BATCH


def test_tokens_after_blocks_part_and_join_with_them():
    stored = replace(BATCH.events[0], lookahead_token_ids=[[300], [8]])
    batch = EventBatch(1.5, [stored])
    assert unpack(pack(batch)) == batch and msgpack.unpackb(pack(batch, "array"))[1][0][-1] == [[300], [8]]
    parts = split(stored)
    assert [part.lookahead_token_ids for part in parts] == [[[300]], [[8]]]
    assert merge(parts) == [stored]


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention"])
def test_every_event_names_its_group_and_stores_their_kind(kind):
    pool = BlockPool(4)
    tree = PrefixTree(pool, 2)
    made, watch, router, events = BlockEvents(2, spec_kind=kind), TreeWatch(tree), MirrorRouter(), []
    watch.listeners.append(lambda changes: events.extend(made.events(changes)))
    watch.poll()
    tree.release(tree.insert([1, 2, 3, 4], pool.allocate(2)))
    watch.poll()
    tree.evict(2)
    watch.poll()
    _, stored, removed = events
    assert (stored.group_idx, stored.kv_cache_spec_kind, removed.group_idx) == (0, kind, 0)
    assert merge(split(stored)) == [stored]
    router.take(0, pack(EventBatch(0.0, events, 0)))
    assert router.held == {"GPU": {}, "CPU": {}}
