"""`kvpage explain --door vllm`: the keys of vLLM's chunks, made without vLLM, and what a tier has of them."""

import hashlib
import pickle
from pathlib import Path

import pytest
import xxhash
from support import fake_vllm
from support.fake_tiering import Tiering, config_of, disk, flip, make_model
from typer.testing import CliRunner

from kvpage.blocks.explain import Ending
from kvpage.store import ByteStore, ByteStoreConfig
from kvpage.store.doors.value_bytes import canonical_cbor, pickled
from kvpage.store.doors.vllm_prompt import ALGORITHMS, VllmPrompt
from kvpage.store.inspection import view_tier
from kvpage.store.prompt_reach import door_reach
from kvpage.store.tiers.memory_tier import MemoryTier
from kvpage.tools.cli import app

SIZE = 16
TOKENS = list(range(100, 100 + 5 * SIZE + 3))


@pytest.fixture(autouse=True)
def _vllm(monkeypatch):
    fake_vllm.installed(monkeypatch)


@pytest.fixture
def model(tmp_path) -> Path:
    return make_model(tmp_path / "model", b"weights")


def sha_of(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


def keys_of(tokens: list[int], blocks_per_chunk: int = 1, group: int = 0, salt: str | None = None) -> list[bytes]:
    """Return vLLM's keys of a prompt's chunks, by the words of its source."""
    before, hashes = sha_of("vllm-none-hash"), []
    for begin in range(0, len(tokens) // SIZE * SIZE, SIZE):
        extras = (("cache_salt", salt),) if salt and begin == 0 else None
        before = sha_of((before, tuple(tokens[begin : begin + SIZE]), extras))
        hashes.append(before)
    return [key + group.to_bytes(4, "big") for key in hashes[blocks_per_chunk - 1 :: blocks_per_chunk]]


def explained(tmp_path: Path, prompt: VllmPrompt):
    tier = view_tier(disk(tmp_path))
    reach = door_reach(tier, prompt)
    tier.close()
    return reach


@pytest.mark.parametrize("num_tokens", [1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE, 5 * SIZE, 5 * SIZE + 3])
def test_it_tells_what_the_tier_finds(tmp_path, model, num_tokens):
    config = config_of(model, cache=fake_vllm.OffloadingCacheConfig(SIZE, 1))
    tiering = Tiering(model, config=config, tiers=[disk(tmp_path)])
    assert tiering.compute("first", keys_of(TOKENS[: 3 * SIZE])).success
    keys = keys_of(TOKENS[:num_tokens])
    num_whole = sum(tiering.load("second", keys))
    tiering.close()
    (reach,) = explained(tmp_path, VllmPrompt(TOKENS[:num_tokens])).reaches
    assert (reach.num_tokens, reach.refused) == (num_whole * SIZE, ())
    is_cut = num_whole == len(keys) and num_tokens % SIZE
    ending = "the rest is shorter than a chunk" if is_cut else "the prompt ends" if num_whole == len(keys) else None
    assert reach.ending == (ending or Ending.NOT_CACHED.value)
    assert "vllm 0.32.0, weights folder" in str(reach) and "group 0" in str(reach)


def test_gaps_damage_salts_and_groups(tmp_path, model):
    config = config_of(model, cache=fake_vllm.OffloadingCacheConfig(SIZE, 2))
    tiering = Tiering(model, config=config, tiers=[disk(tmp_path)])
    salted, plain = keys_of(TOKENS, 2, salt="s"), keys_of(TOKENS, 2, group=1)
    tiering.compute("salted", salted)
    tiering.compute("window", plain[1:])
    tiering.close()
    flip(tmp_path / "kv", salted[1])
    (reach,) = explained(tmp_path, VllmPrompt(TOKENS, salt="s")).reaches
    assert (reach.num_tokens, reach.ending) == (2 * SIZE, "a record is refused")
    assert [(token, reason) for token, reason, _ in reach.refused] == [(2 * SIZE, "damaged")]
    first, second = explained(tmp_path, VllmPrompt(TOKENS)).reaches
    assert (first.num_tokens, second.num_tokens, second.num_further) == (0, 0, 2 * SIZE)
    assert "group 1" in str(second) and "missing before others" in second.ending
    (reach,) = explained(tmp_path, VllmPrompt(TOKENS, salt="s", block_size=2 * SIZE)).reaches
    assert (reach.num_tokens, reach.refused[0].token) == (0, 0) and "chunks of 64" in str(reach)


def test_a_block_size_that_is_no_multiple_is_told(tmp_path, model):
    tiering = Tiering(model, config=config_of(model), tiers=[disk(tmp_path)])
    tiering.compute("first", keys_of(TOKENS)[:2])
    tiering.close()
    reach = explained(tmp_path, VllmPrompt(TOKENS, block_size=24))
    assert [one.ending for one in reach.reaches] == ["nothing can be told: block_size must be a multiple of 16, got 24"]
    assert reach.others == {}


def test_only_the_model_that_was_asked_for(tmp_path, model):
    for folder in (model, make_model(tmp_path / "other", b"weightz")):
        tiering = Tiering(folder, config=config_of(folder), tiers=[disk(tmp_path)])
        tiering.compute("first", keys_of(TOKENS)[:1])
        tiering.close()
    assert len(explained(tmp_path, VllmPrompt(TOKENS)).reaches) == 2
    one_model = explained(tmp_path, VllmPrompt(TOKENS, model=str(model)))
    assert [reach.num_tokens for reach in one_model.reaches] == [SIZE]
    assert one_model.others == {"of another engine or model": 1}
    assert explained(tmp_path, VllmPrompt(TOKENS, model="none")).reaches == ()


def test_the_command_line(tmp_path, model):
    tiering = Tiering(model, config=config_of(model), tiers=[disk(tmp_path)])
    tiering.compute("first", keys_of(TOKENS)[:2])
    (tmp_path / "prompt").write_text(" ".join(map(str, TOKENS)))
    arguments = ["explain", "--store", disk(tmp_path), "--tokens", str(tmp_path / "prompt"), "--door", "vllm"]
    result = CliRunner().invoke(app, arguments)
    tiering.close()
    assert result.exit_code == 0 and f"{2 * SIZE} of {len(TOKENS)} tokens" in result.output
    for wrong in (["--namespace", "n"], ["--rank", "r"], ["--adapter", "a"], ["--hash-algo", "md5"]):
        result = CliRunner().invoke(app, [*arguments, *wrong])
        assert result.exit_code == 1 and "kvpage explain" in str(result.exception)
    result = CliRunner().invoke(app, [*arguments[:-1], "none"])
    assert result.exit_code == 1 and "vllm, sglang" in str(result.exception)


def test_facts_that_no_tier_writes_are_of_another_version():
    tier = MemoryTier(1 << 20, pin_memory=False)
    for number, size in enumerate([0, -1, "x", None, 1 << 40, True]):
        header = {"engine": "vllm 9", "tokens_per_hash": size, "blocks_per_chunk": 1}
        ByteStore(ByteStoreConfig(), header, [tier]).put([b"%d" % number], [b"1234"])
    reach = door_reach(tier, VllmPrompt(TOKENS))
    assert reach.reaches == () and reach.others["of another version"] == 6


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_hash_has_its_seed_and_extras(algorithm):
    prompts = [
        VllmPrompt(TOKENS, algorithm, "0"),
        VllmPrompt(TOKENS, algorithm, "1"),
        VllmPrompt(TOKENS, algorithm, "0", salt="s"),
        VllmPrompt(TOKENS, algorithm, "0", adapter=("a", "/a")),
        VllmPrompt(TOKENS[1:], algorithm, "0"),
    ]
    facts = {"engine": "vllm 0", "tokens_per_hash": SIZE, "blocks_per_chunk": 1}
    keys = [prompt.parts(facts, lambda key: None)[0].keys for prompt in prompts]
    assert len({key for row in keys for key in row}) == sum(map(len, keys))
    num_bytes = 16 + (32 if algorithm.startswith("sha256") else 16) + 4
    assert {len(key) for row in keys for key in row} == {num_bytes}


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 128, 30_000, 70_000])
def test_pickles_are_pythons(num_tokens):
    tokens = tuple((0, 255, 256, 65535, 65536, 2**31 - 1, number)[number % 7] for number in range(num_tokens))
    for extras in (None, (("lora", "a" * 300, "/a"), ("cache_salt", "\u00e9")), (("cache_salt", ""),)):
        value = (b"b" * 32, tokens, extras)
        assert pickled(value) == pickle.dumps(value, protocol=5)
    for value in ("0", "", None, b"", b"x" * 256, 7, ()):
        assert pickled(value) == pickle.dumps(value, protocol=5)


@pytest.mark.parametrize("num_bytes", [2**16 - 2, 2**16 - 1, 2**16, 70_000])
def test_pickles_of_long_texts_are_pythons(num_bytes):
    for value in ("s" * num_bytes, (b"b" * 32, (1, 2), (("cache_salt", "\u00e9" * (num_bytes // 2)),))):
        assert pickled(value) == pickle.dumps(value, protocol=5)


def test_frames_end_where_pythons_do():
    """A frame of 64 KiB ends before the next object, and not behind its last one."""
    for num_tokens in range(21_815, 21_840):  # of 3 bytes each
        value = (b"b" * 32, tuple(range(300, 300 + num_tokens)), (("cache_salt", "s" * 254),))
        assert pickled(value) == pickle.dumps(value, protocol=5)


def test_the_cbor_of_a_block_is_canonical():
    """By RFC 8949: the shortest heads."""
    for number, text in (
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (256, "190100"),
        (65536, "1a00010000"),
        (2**32, "1b" + f"{2**32:016x}"),
    ):
        assert canonical_cbor(number).hex() == text
    value = (b"ab", (1, 500), (("cache_salt", "s"),))
    assert canonical_cbor(value).hex() == "8342616282011901f481826a63616368655f73616c746173"
    assert canonical_cbor((b"", (), None)).hex() == "834080f6"
    assert len(xxhash.xxh3_128_digest(canonical_cbor(value))) == 16


def test_wrong_prompts_are_refused():
    for wrong in ({"tokens": []}, {"hash_algo": "md5"}, {"hash_algo": "xxhash"}, {"block_size": 0}):
        with pytest.raises(ValueError):
            VllmPrompt(**{"tokens": TOKENS, **wrong})
