"""Configuration from code, YAML and the environment; URLs; tiers of one's own."""

from pathlib import Path
from urllib.parse import quote

import pytest

from kvpage.store import KVStoreConfig, register_tier
from kvpage.store.config import TierURL, parse_size
from kvpage.store.inspection import open_tier
from kvpage.store.placement import place_tiers
from kvpage.store.tiers.memory_tier import MemoryTier
from kvpage.store.tiers.policy import POLICIES


@pytest.mark.parametrize(
    "text, size",
    [("0", 0), ("4096", 4096), (17, 17), ("8GiB", 8 << 30), ("1.5 MiB", 3 << 19), ("2kib", 2048), ("1TiB", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8GB", "-1", "eight", "nan", "inf", "1e400GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="a size must be like"):
        parse_size(text)


def test_urls() -> None:
    url = TierURL.parse("disk:///ssd0/kv,/ssd1/k%20v?size=1TiB&policy=lfu")
    assert (url.scheme, url.place, url.option("size"), url.option("x")) == ("disk", "/ssd0/kv,/ssd1/k v", "1TiB", None)
    url = TierURL.parse("redis://me:secret@host:6379/0?ttl=5&write=back&prefix=a%26b")
    assert url.text == "redis://host:6379/0" and "secret" not in repr(url)
    assert url.without("write", "promote") == "redis://me:secret@host:6379/0?ttl=5&prefix=a%26b"
    for wrong in ("", "memory", "/a/path"):
        with pytest.raises(ValueError, match="a tier must be a URL"):
            TierURL.parse(wrong)
    with pytest.raises(ValueError, match="given once"):
        TierURL.parse("memory://?size=1&size=2")


def test_from_code_yaml_and_the_environment(tmp_path) -> None:
    expected = KVStoreConfig(128, ("memory://?size=1MiB", "redis://localhost"), "zstd", True, 0.5, 2, 3 << 20)
    path = tmp_path / "store.yaml"
    path.write_text(
        "chunk_size: 128\ntiers:\n  - memory://?size=1MiB\n  - redis://localhost\ncodec: zstd\n"
        "save_decode_cache: true\ndeadline: 0.5\nnum_threads: 2\nkept_result_bytes: 3MiB\n"
    )
    assert KVStoreConfig.from_yaml(path) == expected
    environ = {
        "KVPAGE_CHUNK_SIZE": "128", "KVPAGE_TIERS": "memory://?size=1MiB redis://localhost", "KVPAGE_CODEC": "zstd",
        "KVPAGE_SAVE_DECODE_CACHE": "yes", "KVPAGE_DEADLINE": "0.5", "KVPAGE_NUM_THREADS": "2", "KVPAGE_CUDA": "OFF",
        "PATH": "/bin", "KVPAGE_KEPT_RESULT_BYTES": "3MiB",
    }  # fmt: skip
    assert KVStoreConfig.from_env(environ) == expected
    assert KVStoreConfig.from_env({}) == KVStoreConfig.from_dict({}) == KVStoreConfig()
    assert KVStoreConfig(tiers="memory://").tiers == ("memory://",)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"chunk_sise": 3}, "keys must be among .*chunk_size.*, got chunk_sise"),
        ({"chunk_size": 0}, "chunk_size must be an integer of at least 1"),
        ({"chunk_size": "256"}, "chunk_size must be an integer"),
        ({"num_threads": -1}, "num_threads must be an integer of at least 0"),
        ({"kept_result_bytes": -1}, "kept_result_bytes must be an integer of at least 0"),
        ({"kept_result_bytes": "much"}, "a size must be like 8GiB"),
        ({"tiers": ()}, "tiers must name at least one"),
        ({"tiers": ("here",)}, "a tier must be a URL"),
        ({"deadline": 0}, "deadline must be positive seconds"),
        ({"save_decode_cache": "no"}, "save_decode_cache must be True or False"),
    ],
)
def test_bad_configurations(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVStoreConfig.from_dict(values)


def test_bad_files_and_environments(tmp_path) -> None:
    path = tmp_path / "store.yaml"
    path.write_text("- memory://\n")
    with pytest.raises(ValueError, match="must hold keys and values, got list"):
        KVStoreConfig.from_yaml(path)
    for name, value, message in (
        ("KVPAGE_CHUNKSIZE", "3", "got chunksize"),
        ("KVPAGE_CHUNK_SIZE", "many", "chunk_size must be a number, got 'many'"),
        ("KVPAGE_SAVE_DECODE_CACHE", "maybe", "save_decode_cache must be true or false"),
        ("KVPAGE_DEADLINE", "soon", "deadline must be a number"),
    ):
        with pytest.raises(ValueError, match=message):
            KVStoreConfig.from_env({name: value})


def test_tiers_are_made_in_order_with_their_parts() -> None:
    config = KVStoreConfig(
        tiers=("memory://?size=1MiB&policy=lfu", "memory://?size=2MiB&write=back&promote=no&deadline=0.25"),
        deadline=3.0,
    )
    first, second = place_tiers(config)
    assert (first.is_written_back, first.promotes, first.deadline) == (False, True, 3.0)
    assert (second.is_written_back, second.promotes, second.deadline) == (True, False, 0.25)
    assert (first.tier.stats().capacity, second.tier.stats().capacity) == (1 << 20, 2 << 20)


@pytest.mark.parametrize(
    "url, message",
    [
        ("magnetic://tape", "scheme must be one of .*memory.*, got 'magnetic'"),
        ("memory://?sise=3", "options of memory:// must be among size, policy, prefault, .*got 'sise'"),
        ("memory://?size=1", "capacity must be an integer of at least"),
        ("memory://?policy=mru", f"policy must be one of {', '.join(POLICIES)}, got 'mru'"),
        ("memory://?write=never", "write must be one of through, back, got 'never'"),
        ("memory://?prefault=1", "prefault must be one of yes, no, got '1'"),
        ("memory://?promote=1", "promote must be one of yes, no"),
        ("memory://?deadline=-1", "deadline must be positive seconds"),
        ("redis://localhost?colour=red", "colour"),
    ],
)
def test_bad_tiers_close_those_before_them(url: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(MemoryTier, "close", lambda self: closed.append(self))
    with pytest.raises(ValueError, match=message):
        place_tiers(KVStoreConfig(tiers=("memory://?size=1MiB", url)))
    assert len(closed) == 1


def test_a_tier_of_ones_own() -> None:
    def make(url: TierURL) -> MemoryTier:
        return MemoryTier(parse_size(url.option("size", "1MiB")), name=url.place)

    register_tier("mine-for-tests", make)
    register_tier("mine-for-tests", make)
    (placed,) = place_tiers(KVStoreConfig(tiers=("mine-for-tests://here?size=8KiB",)))
    assert placed.tier.name == "here" and placed.tier.stats().capacity == 8192
    with pytest.raises(ValueError, match="scheme must be a new one, 'memory' is taken"):
        register_tier("memory", make)


@pytest.mark.parametrize(
    "url, message",
    [
        ("disk://kv", r"must begin with / after disk://, such as disk:///kv, or .* such as disk:kv, got disk://kv"),
        ("disk://a/kv?size=1MiB", r"such as disk:///a/kv, .* such as disk:a/kv, got disk://a/kv"),
        ("disk://user:secret@a/kv", r"got disk://a/kv$"),
        ("disk:///ssd0/kv,ssd1/kv", r"such as disk:///ssd0/kv,/ssd1/kv, "),
        ("disk://./kv", r"such as disk:///./kv"),
        ("disk:", "each name a directory of this system, none empty.* got '' in disk:$"),
        ("disk://", "none empty"),
        ("disk:///", "none empty"),
        ("disk:///?size=1MiB", "none empty"),
        ("disk:///a,,/b", "none empty"),
        ("disk:///a,", "none empty"),
        ("disk:~/kv", "without ~"),
        ("disk:///~/kv", "without ~"),
        ("disk://~/kv", "without ~"),
        (r"disk:C:\kv", "a drive's letter"),
        (r"disk://C:\kv", "a drive's letter"),
        ("disk:///C:/kv", "a drive's letter"),
        (r"disk:///kv\a", "a directory of this system"),
        ("disk:///kv#1", "must have %23 for #"),
    ],
)
def test_paths_that_would_lead_elsewhere(
    url: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for make in (lambda: place_tiers(KVStoreConfig(tiers=(url,))), lambda: open_tier(url)):
        with pytest.raises(ValueError, match=message):
            make()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("paths", [["kv"], ["a/kv", "b/kv"], ["sub/../kv"], ["with space"]])
def test_relative_paths_on_purpose(paths: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (placed,) = place_tiers(KVStoreConfig(tiers=(f"disk:{','.join(map(quote, paths))}?size=4MiB&segment=1MiB",)))
    placed.tier.close()
    assert all((tmp_path / path / "lock").exists() for path in paths)
    assert TierURL.parse("disk:kv").text == "disk:kv" and TierURL.parse("disk:///kv").text == "disk:///kv"
