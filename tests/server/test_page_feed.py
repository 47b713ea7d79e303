"""Feed and picture: what the page draws, at a bounded cost, and of the viewer's own namespaces only."""

import asyncio
import json

from support.models import make_model, make_prompts
from support.tokenizers_made import byte_level
from support.waiting import until

from kvpage import CacheConfig
from kvpage.server.page.ended import MAX_ENDED, EndedRequests
from kvpage.server.page.feed import INTERVAL, MAX_WATCHERS, SHARE, Feed
from kvpage.server.page.picture import picture
from kvpage.server.page.snapshot import MAX_LANES, MAX_PREFIXES, take_snapshot
from kvpage.server.page.texts import MAX_TEXTS, TokenTexts
from kvpage.serving import AsyncEngine, Engine, EngineConfig, SamplingParams
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.store.tiers.memory_tier import MemoryTier

B = 4
PROMPT, OTHER = make_prompts([6 * B + 1, 6 * B + 1])
PARAMS = SamplingParams(max_tokens=3)


def make_engine(num_blocks: int = 64, num_cpu_blocks: int = 0, **options: object) -> Engine:
    cache = CacheConfig(block_size=B, num_gpu_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks)
    return Engine.from_model(make_model("llama"), EngineConfig(cache, load_or_compute=False, **options))


def drawn(engine: Engine, *namespaces: bytes, ended: EndedRequests | None = None, store: KVStore | None = None) -> dict:
    shown = tuple(namespaces or (b"",))
    of = () if ended is None else ended.of(shown)
    stats = None if store is None else store.stats()
    found = picture(take_snapshot(engine, shown), stats, of, lambda tokens: f"{len(tokens) // 4} tokens")
    return json.loads(json.dumps(found))


def test_an_engine_that_has_done_nothing():
    found = drawn(make_engine())
    assert found["blocks"] == {"total": 64, "free": 64, "cached": 0, "used": 0, "pinned": 0}
    assert found["host"] is None and found["hits"] == [["device", 0]]
    assert found["requests"] == found["ended"] == found["prefixes"] == found["tiers"] == []


def test_blocks_add_up_and_prefixes_are_a_tree():
    engine = make_engine(pin_quota=8)
    engine.generate([PROMPT, [*PROMPT[: 4 * B], *OTHER]], PARAMS)
    handle = engine.manager.space.pin(PROMPT[: 2 * B])
    engine.add_request([*PROMPT, 1, 2, 3], SamplingParams(max_tokens=50))
    engine.step()
    found = drawn(engine)
    blocks = found["blocks"]
    assert blocks["total"] == sum(blocks[name] for name in ("free", "cached", "used", "pinned"))
    assert blocks["pinned"] == 2 and blocks["used"] > 2 and blocks["cached"] > 2
    root, *others = found["prefixes"]
    assert root["parent"] is None and root["pins"] > 0 and {one["parent"] for one in others} >= {0}
    assert all(one["start"] == found["prefixes"][one["parent"]]["tokens"] for one in others if one["parent"] == 0)
    assert sum(one["blocks"] for one in found["prefixes"]) == engine.manager.tree.num_cached
    (lane,) = found["requests"]
    assert (lane["stage"], lane["prompt"], lane["generated"]) == ("decode", len(PROMPT) + 3, 1)
    assert lane["cached"] > 0 == lane["loaded"] and lane["cached"] + lane["computed"] == lane["prompt"]
    engine.manager.space.unpin(handle)


def test_hits_by_tier_are_all_that_was_found():
    source, engine = make_engine(), make_engine(12, 12)
    tier = MemoryTier(1 << 22, pin_memory=False)
    with KVStore(KVStoreConfig(2 * B), metadata_of(engine.cache, "m"), [tier]) as store:
        for one in (source, engine):
            one.use_store(store)
        source.generate([PROMPT], PARAMS)
        source.close()
        for prompt in (PROMPT, OTHER, PROMPT, OTHER, OTHER):
            engine.generate([prompt], PARAMS)
        found = drawn(engine, store=store)
        hits = dict(found["hits"])
        assert list(hits) == ["device", "host", "memory"] and all(count > 0 for count in hits.values())
        assert sum(hits.values()) == found["tokens"]["cached"] <= found["tokens"]["prompt"] == 5 * len(PROMPT)
        assert found["tiers"][0]["name"] == "memory" and found["tiers"][0]["records"] > 0
        host = found["host"]
        assert host["total"] == sum(host[name] for name in ("free", "cached", "used")) == 12
        engine.close()


def test_another_namespace_shows_neither_requests_nor_prefixes():
    engine, ended = make_engine(), EndedRequests()
    for namespace, prompt in ((b"mine", PROMPT), (b"other", OTHER)):
        engine.add_request(prompt, PARAMS, namespace.decode(), namespace)
    while engine.has_unfinished:
        for output in [one.output for one in engine.step() if one.output is not None]:
            ended.note(output, output.request_id.encode())
    for namespace in (b"mine", b"other"):
        engine.add_request(PROMPT, SamplingParams(max_tokens=50), f"new-{namespace.decode()}", namespace)
    engine.step()
    mine = drawn(engine, b"mine", ended=ended)
    assert [one["id"] for one in mine["requests"]] == ["new-mine"] and [one["id"] for one in mine["ended"]] == ["mine"]
    assert len(mine["prefixes"]) > 0 and mine["running"] == 2
    both = drawn(engine, b"mine", b"other", ended=ended)
    assert len(both["prefixes"]) > len(mine["prefixes"]) and len(both["requests"]) == len(both["ended"]) == 2
    assert all(one["parent"] is None or one["parent"] < place for place, one in enumerate(both["prefixes"]))
    nobody = drawn(engine, b"none", ended=ended)
    assert nobody["requests"] == nobody["ended"] == nobody["prefixes"] == []


def test_a_picture_is_bounded():
    engine, ended = make_engine(256, max_num_seqs=64), EndedRequests()
    for first in range(2 * MAX_PREFIXES):
        engine.add_request([first, *range(2 * B)], SamplingParams(max_tokens=30))
    (output,) = engine.generate([PROMPT], PARAMS)
    for _ in range(2 * MAX_ENDED):
        ended.note(output, b"")
    found = drawn(engine, ended=ended)
    assert len(found["prefixes"]) == MAX_PREFIXES
    assert len(found["requests"]) == len(found["ended"]) == MAX_LANES and len(ended.of((b"",))) == MAX_ENDED
    assert found["ended"][0]["cached"] + found["ended"][0]["computed"] == len(PROMPT)


def test_texts_are_those_of_the_tokenizer_and_are_forgotten_in_the_end():
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    token_ids = tokenizer("the quick brown fox")["input_ids"]
    as_bytes = b"".join(one.to_bytes(4, "little") for one in token_ids)
    assert texts(as_bytes) == texts(as_bytes) == "the quick brown fox"
    for number in range(2 * MAX_TEXTS):
        texts((number % 300).to_bytes(4, "little") + (number // 300).to_bytes(4, "little"))
    assert len(texts._texts) == MAX_TEXTS


def watched(num_watchers: int, work) -> None:
    async def main() -> None:
        async with AsyncEngine(make_engine()) as live:
            feed = Feed(live, byte_level())
            await work(live, feed, [feed.watch((b"",)) for _ in range(num_watchers)])
            assert feed.num_watchers == 0

    asyncio.run(main())


def test_nobody_watches_nothing_is_asked():
    async def work(live, feed, watchers):
        calls = []
        live.call, call = lambda function: calls.append(function) or call(function), live.call
        await asyncio.sleep(0.05)
        assert not calls
        await anext(watchers[0])
        assert len(calls) == 1
        await watchers[0].aclose()
        await asyncio.sleep(0.05)
        assert len(calls) == 1

    watched(1, work)


def test_pictures_come_while_requests_run_and_end_with_the_engine():
    async def work(live, feed, watchers):
        request = live.submit(PROMPT, SamplingParams(max_tokens=200))
        first = await anext(watchers[0])
        output = [one async for one in request] and request.output
        feed.ended.note(output, b"")
        second = await anext(watchers[0])
        assert second["time"] - first["time"] >= INTERVAL * 0.9 and second["tokens"]["generated"] == 200
        assert [one["id"] for one in second["ended"]] == [request.request_id] and second["prefixes"][0]["text"]
        await live.drain()
        assert [one async for one in watchers[0]] == []

    watched(1, work)


def test_more_than_the_most_watchers_see_nothing():
    async def work(live, feed, watchers):
        for one in watchers[:-1]:
            await anext(one)
        assert [one async for one in watchers[-1]] == [] and feed.num_watchers == MAX_WATCHERS
        for one in watchers:
            await one.aclose()

    watched(MAX_WATCHERS + 1, work)


def test_the_next_turn_waits_for_its_share(monkeypatch):
    async def work(live, feed, watchers):
        monkeypatch.setattr("kvpage.server.page.feed.take_snapshot", lambda *args: _slow(*args))
        first = await anext(watchers[0])
        second = await anext(watchers[1])
        assert second["time"] - first["time"] >= SHARE * 0.001
        for one in watchers:
            await one.aclose()

    def _slow(engine, namespaces):
        snapshot = take_snapshot(engine, namespaces)
        object.__setattr__(snapshot, "seconds", 0.001)
        return snapshot

    watched(2, work)


def test_a_request_that_ended_before_its_first_token():
    engine, ended = make_engine(), EndedRequests()
    engine.add_request(PROMPT, PARAMS, "gone")
    ended.note(engine.abort("gone"), b"")
    (lane,) = drawn(engine, ended=ended)["ended"]
    assert (lane["stage"], lane["computed"], lane["cached"], lane["generated"]) == ("abort", 0, 0, 0)


def test_a_stream_that_was_left_is_noted_once_it_has_ended():
    ended = EndedRequests()
    with AsyncEngine(make_engine()) as live:
        requests = [live.submit(PROMPT, SamplingParams(max_tokens=count)) for count in (150, 2)]
        for _ in requests[1]:
            requests[0].abort()
        ended.follow(requests, b"mine")
        until(lambda: len(ended.of((b"mine",))) == 2)
        assert {one.parts["stage"] for one in ended.of((b"mine",))} == {"abort", "length"}
        assert ended.of((b"other",)) == [] and not ended._leaving
