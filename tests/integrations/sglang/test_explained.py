"""`kvpage explain --door sglang`: the keys of SGLang's pages, made without SGLang, and what a tier has of them."""

import hashlib
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from support import fake_sglang
from support.fake_sglang import PoolName
from support.host_pools import PAGE, MadePool, tokens_of
from typer.testing import CliRunner

from kvpage.store import ByteStore
from kvpage.store.doors.sglang_prompt import SGLangPrompt, packed, pool_of, scopes_key, unpacked
from kvpage.store.inspection import view_tier
from kvpage.store.prompt_reach import TierReach, door_reach
from kvpage.tools.cli import app

TOKENS = list(range(7, 7 + 5 * PAGE + 1))


@pytest.fixture
def url(tmp_path) -> str:
    return f"disk:{tmp_path}/kv?size=8MiB&segment=1MiB"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, url: str) -> Iterator[Any]:
    """A backend over a filled pool, on disk."""
    module, made = fake_sglang.installed(monkeypatch), []

    def backend(model: str = "model@1", **pools: Any) -> Any:
        config = fake_sglang.config({"tiers": [url], "model": model, "num_threads": 1, "interface_v1": 1})
        made.append(module.KVPageHiCache(config, {}))
        made[-1].register_mem_pool_host(filled())
        for name, other in pools.items():
            made[-1].register_mem_host_pool_v2(other, PoolName(name))
        return made[-1]

    yield backend
    for storage in made:
        storage.close()


def filled() -> MadePool:
    pool = MadePool()
    pool.fill(1)
    return pool


def hashes_of(tokens: list[int], prior: bytes = b"") -> list[str]:
    """Return SGLang's hashes of whole pages, by the words of its source."""
    hashes = []
    for begin in range(0, len(tokens) // PAGE * PAGE, PAGE):
        digest = hashlib.sha256(prior)
        for token in tokens[begin : begin + PAGE]:
            digest.update(token.to_bytes(4, "little"))
        prior = digest.digest()
        hashes.append(prior.hex())
    return hashes


def explained(url: str, **fields: Any) -> TierReach:
    tier = view_tier(url)
    reach = door_reach(tier, SGLangPrompt(**{"tokens": TOKENS, **fields}))
    tier.close()
    return reach


@pytest.mark.parametrize("num_tokens", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 5 * PAGE, 5 * PAGE + 1])
def test_it_tells_what_the_backend_finds(make, url, num_tokens):
    backend, keys = make(), hashes_of(TOKENS)
    assert backend.batch_set_v1(keys[:3], tokens_of(0, 1, 2)) == [True] * 3
    num_whole = backend.batch_exists(hashes_of(TOKENS[:num_tokens]))
    (reach,) = explained(url, tokens=TOKENS[:num_tokens]).reaches
    assert (reach.num_tokens, reach.refused) == (num_whole * PAGE, ())
    assert "model model@1" in str(reach) and f"pool kv (pages of {PAGE})" in str(reach)


def test_pools_salts_adapters_and_gaps(make, url):
    backend = make(mamba=filled())
    lora = uuid.uuid5(uuid.NAMESPACE_URL, "a\0/a").hex.encode()
    seed = hashlib.sha256(
        b"sglang-cache-namespace-v1\1" + (32).to_bytes(8, "little") + lora + b"\1" + (1).to_bytes(8, "little") + b"s"
    )
    keys = hashes_of(TOKENS, seed.digest())
    assert backend.batch_set_v1(keys[1:3], tokens_of(1, 2)) == [True] * 2
    both = explained(url, salt="s", adapter=("a", "/a")).reaches
    assert [reach.num_further for reach in both] == [2 * PAGE, 0] and "pool mamba" in str(both[1])
    assert "missing before others" in both[0].ending
    assert [reach.num_further for reach in explained(url, salt="s").reaches] == [0, 0]
    (reach,) = explained(url, rank="dp0-pp0-cp0-tp1").reaches
    assert reach.ending == "nothing can be told: the rank has no record of its pools here" and "tp1" in reach.name
    assert explained(url, model="other").reaches == ()


def test_scopes_come_back_where_they_were_removed(make, url):
    backend, keys = make(), hashes_of(TOKENS)
    backend.batch_set_v1(keys[:1], tokens_of(0))
    assert backend._storage._store.remove([scopes_key("dp0-pp0-cp0-tp0")]) == [True]
    assert "no record" in str(explained(url).reaches[0])
    backend.batch_set_v1(keys[:1], tokens_of(0))
    assert explained(url).reaches[0].num_tokens == PAGE


def test_scopes_that_were_not_stored_are_stored_again(make, url, monkeypatch):
    backend, keys = make(), hashes_of(TOKENS)
    backend.batch_set_v1(keys[:1], tokens_of(0))
    backend.register_mem_host_pool_v2(filled(), PoolName("mamba"))
    with monkeypatch.context() as patch:
        patch.setattr(ByteStore, "put", lambda store, keys, *rest, **named: [False] * len(keys))
        backend.batch_set_v1(keys[1:2], tokens_of(1))
    assert len(explained(url).reaches) == 1
    backend.batch_set_v1(keys[1:2], tokens_of(1))
    assert len(explained(url).reaches) == 2


def test_the_command_line(make, url, tmp_path):
    backend = make()
    backend.batch_set_v1(hashes_of(TOKENS), tokens_of(*range(5)))
    (tmp_path / "prompt").write_text(json.dumps(TOKENS))
    arguments = ["explain", "--store", url, "--tokens", str(tmp_path / "prompt"), "--door", "sglang"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and f"{5 * PAGE} of {len(TOKENS)} tokens" in result.output
    assert "shorter than a chunk" in result.output
    result = CliRunner().invoke(app, [*arguments, "--block-size", "4"])
    assert result.exit_code == 1 and "--block-size" in str(result.exception)


def test_records_that_no_backend_writes_are_refused():
    assert unpacked(packed([b"a\0", b"b\0"])) == [b"a\0", b"b\0"]
    for data in (b"", b"{}", b"[1]", b"\xff", b"[" * 100_000):
        with pytest.raises(ValueError):
            unpacked(data)
    for scope in (b"\0", b"[]\0", b'["kv", "", "", {"page_size": "0", "logical_page_size": "None"}]\0', b'{"3": 1}\0'):
        with pytest.raises(ValueError):
            pool_of(scope)
    with pytest.raises(ValueError):
        SGLangPrompt([])
