"""Settings of KVPageTier, names of weights, and the check of vLLM's interface."""

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support import fake_vllm

from kvpage.integrations import vllm
from kvpage.integrations.vllm import StoreTierConfig
from kvpage.integrations.vllm.chunk_rows import ChunkRows
from kvpage.integrations.vllm.identity.weights import weights_name
from kvpage.integrations.vllm.interface import check_interface

MEMORY = ("memory://?size=1MiB",)


def test_an_unknown_key_names_the_known_ones():
    with pytest.raises(ValueError, match=r"keys of a KVPageTier must be among .*max_pending.*tiers.*, got tires$"):
        StoreTierConfig.from_dict({"tires": []})


def test_the_engine_does_not_start_with_an_unknown_key(monkeypatch, tmp_path):
    fake_vllm.installed(monkeypatch)
    from support.fake_tiering import Tiering

    with pytest.raises(ValueError, match="got root_dir, threads"):
        Tiering(tmp_path, tiers=MEMORY, root_dir="/", threads=2)


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({}, ValueError, "tiers must be given"),
        ({"tiers": []}, ValueError, "tiers must name at least one"),
        ({"tiers": [3]}, TypeError, "a tier must be a URL"),
        ({"tiers": MEMORY, "weights": ""}, ValueError, "weights must name the weights, got ''"),
        ({"tiers": MEMORY, "weights": 3}, TypeError, "weights must be text or None, got int"),
        ({"tiers": MEMORY, "num_threads": 0}, ValueError, "num_threads must be"),
        ({"tiers": MEMORY, "deadline": 0}, ValueError, "deadline must be"),
        ({"tiers": MEMORY, "max_pending": 0}, ValueError, "max_pending must be"),
        ({"tiers": MEMORY, "max_pending": "many"}, ValueError, "a size must be like"),
        ({"tiers": MEMORY, "locality": "NEAR"}, ValueError, "locality must be one of LOCAL, REMOTE or None"),
        ({"tiers": MEMORY, "load_patience": 0}, ValueError, "load_patience must be positive and finite, got 0"),
        ({"tiers": MEMORY, "store_patience": float("inf")}, ValueError, "store_patience must be positive and finite"),
        ({"tiers": MEMORY, "lookup_patience": "1"}, TypeError, "lookup_patience must be seconds, got str"),
        ({"tiers": MEMORY, "enable_kv_events": 1}, ValueError, "enable_kv_events must be"),
        ({"tiers": MEMORY, "persistent": "no"}, ValueError, "persistent must be True or False, got 'no'"),
        ({"tiers": MEMORY, "on_reset": "clear"}, ValueError, "on_reset must be one of forget, keep, got 'clear'"),
        ({"tiers": MEMORY, "lookup_patience": True}, TypeError, "lookup_patience must be seconds, got bool"),
    ],
)
def test_wrong_settings_are_refused(values, error, text):
    with pytest.raises(error, match=text):
        StoreTierConfig.from_dict(values)


def test_settings_of_json():
    config = StoreTierConfig.from_dict({"tiers": list(MEMORY), "max_pending": "2MiB", "locality": "LOCAL"})
    assert config.tiers == MEMORY and config.pending_bytes(1 << 40) == 2 << 20
    coded = StoreTierConfig(("disk:kv?codec=split",))
    assert coded.of_store("dp0", "float16").dtype == "float16"
    with pytest.raises(ValueError, match="dtype must be given"):
        coded.of_store("dp0", None)
    default = StoreTierConfig(MEMORY)
    assert [default.pending_bytes(size) for size in (0, 1 << 29, (1 << 29) + 2, 1 << 31)] == [
        1 << 28, 1 << 28, (1 << 28) + 1, 1 << 30,
    ]  # fmt: skip
    assert dataclasses.is_dataclass(config) and not hasattr(config, "__dict__")


def test_a_model_of_the_hub_has_its_commit_or_needs_a_name(tmp_path):
    pytest.importorskip("huggingface_hub")
    with pytest.raises(ValueError, match='weights must be given for a model that is neither .* such as "a/b@rev'):
        weights_name("a/b", None)
    assert weights_name("a/b", "a/b@1") != weights_name("a/b", "a/b@2")
    place, commits = tmp_path / "models--a--b", ("1" * 40, "2" * 40)
    for commit in commits:
        (place / "snapshots" / commit).mkdir(parents=True)
        (place / "snapshots" / commit / "config.json").write_text("{}")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commits[0])
    found = [weights_name("a/b", None, hub_config(tmp_path, revision)) for revision in (None, *commits)]
    assert found == [f"hub a/b {commit}" for commit in (commits[0], *commits)]


def test_a_drafting_model_is_named_and_streamed_weights_must_be(tmp_path):
    (tmp_path / "model").write_bytes(b"1")
    (tmp_path / "draft").write_bytes(b"2")
    model, draft, config = str(tmp_path / "model"), str(tmp_path / "draft"), hub_config(None, None)
    alone = weights_name(model, None, config)
    config.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace(model=model, revision=None))
    assert weights_name(model, None, config) == alone  # its own last layers draft
    config.speculative_config.draft_model_config.model = draft
    assert weights_name(model, None, config) == f"{alone} draft {weights_name(draft, None)}"
    config.model_config.model_weights = "s3://bucket/model"
    with pytest.raises(ValueError, match="weights must be given for weights that are streamed from s3://bucket/model"):
        weights_name(model, None, config)


def hub_config(cache, revision):
    model, load = SimpleNamespace(revision=revision), SimpleNamespace(download_dir=cache)
    return SimpleNamespace(model_config=model, load_config=load)


def test_each_byte_of_the_weights_is_in_their_name(tmp_path):
    (tmp_path / "sub").mkdir()
    files = {tmp_path / "config.json": b"{}", tmp_path / "a.safetensors": b"ab", tmp_path / "sub" / "b.bin": b"c"}
    for path, data in files.items():
        path.write_bytes(data)
    names = {weights_name(str(tmp_path), None)}
    for path, data in files.items():
        path.write_bytes(data[:-1] + b"?")
        names.add(weights_name(str(tmp_path), None))
        path.write_bytes(data)
    (tmp_path / "a.safetensors").rename(tmp_path / "c.safetensors")
    names.add(weights_name(str(tmp_path), None))
    assert len(names) == 5
    assert weights_name(str(tmp_path / "c.safetensors"), None) not in names


def test_weights_of_any_name_and_place_are_in_their_name(tmp_path):
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    folder.mkdir(), elsewhere.mkdir()
    with pytest.raises(ValueError, match="weights must be given for a folder without files"):
        weights_name(str(folder), None)
    (folder / ".hidden").write_bytes(b"1")
    (folder / "linked").symlink_to(elsewhere)
    (elsewhere / "circle").symlink_to(folder)
    names = set()
    for data in (b"1", b"2"):
        (folder / "model.tensors").write_bytes(data)
        for other in (b"1", b"2"):
            (elsewhere / "part").write_bytes(other)
            names.add(weights_name(str(folder), None))
    (folder / ".hidden").write_bytes(b"2")
    assert len(names) == 4 and weights_name(str(folder), None) in names


def test_rows_leave_the_view_alone():
    memory = np.arange(12, dtype=np.uint8).reshape(3, 4)
    view = memoryview(memory)
    rows = ChunkRows(view)
    assert [rows[number].tolist() for number in range(3)] == memory.tolist()
    row = rows[1]
    view.release()  # vLLM frees its memory: a row may still be somewhere
    row[:] = 9
    assert memory[1].tolist() == [9] * 4
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match="chunk_id must be in 0..2"):
            rows[wrong]


@pytest.mark.parametrize(
    "memory", [np.zeros(4, np.uint8), np.zeros((2, 4), np.int16), np.zeros((2, 8), np.uint8)[:, ::2]]
)
def test_rows_of_another_shape_are_refused(memory):
    with pytest.raises(ValueError, match="primary_kv_view must be contiguous bytes"):
        ChunkRows(memoryview(memory))


# --- vLLM itself ---


def test_vllm_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("kvpage.integrations.vllm.interface.DISTRIBUTIONS", ("no-such-vllm",))
    with pytest.raises(ImportError, match=r"KVPageTier needs vLLM 0\.32 or 0\.33, found none: pip install vllm"):
        _ = vllm.KVPageTier


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Tier'"):
        _ = vllm.Tier


def test_an_untested_version_with_the_same_interface_warns(monkeypatch, caplog):
    fake_vllm.installed(monkeypatch, "0.34.1")
    check_interface()
    assert "vLLM 0.34.1 was not tested with kvpage's KVPageTier" in caplog.text


class _Other:
    def lookup(self, keys): ...


@pytest.mark.parametrize(
    ("module", "name", "member", "text"),
    [
        ("vllm.v1.kv_offload.tiering.base", "SecondaryTierManager", _Other, "SecondaryTierManager has no drain_jobs"),
        ("vllm.v1.kv_offload.tiering.base", "SecondaryTierManager", _Other, "lookup takes self, keys"),
        ("vllm.v1.kv_offload.base", "LookupResult", object, "LookupResult has no HIT"),
        ("vllm.v1.kv_offload.tiering.base", "JobResult", fake_vllm.ReqContext, "JobResult has no successful_keys"),
        ("vllm.v1.kv_offload.tiering.base", "TransferJob", None, "has no attribute 'TransferJob'"),
    ],
)
def test_a_version_with_another_interface_is_refused_by_name(monkeypatch, module, name, member, text):
    fake_vllm.installed(monkeypatch, "0.31.0")
    if member is None:
        monkeypatch.delattr(sys.modules[module], name)
    else:
        monkeypatch.setattr(sys.modules[module], name, member)
    with pytest.raises(ImportError, match=rf"interface of vLLM 0\.31\.0 differs: .*{text}"):
        _ = vllm.KVPageTier


def test_a_new_duty_of_a_tier_is_refused(monkeypatch):
    fake_vllm.installed(monkeypatch, "0.40.0")
    base = sys.modules["vllm.v1.kv_offload.tiering.base"]
    duties = frozenset({*base.SecondaryTierManager.__abstractmethods__, "evict"})
    monkeypatch.setattr(base, "SecondaryTierManager", type("SecondaryTierManager", (base.SecondaryTierManager,), {}))
    base.SecondaryTierManager.__abstractmethods__ = duties
    with pytest.raises(ImportError, match="SecondaryTierManager asks for evict"):
        check_interface()
