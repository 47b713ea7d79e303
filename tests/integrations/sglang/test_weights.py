"""Names of weights: whatever changes what a model computes is another name, and no page is found under it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import fake_sglang
from support.host_pools import MadePool, tokens_of

from kvpage.integrations.sglang import ServedModel
from kvpage.store.doors.weight_files import PART_BYTES

KEY = ["a" * 64]
BIG = b"w" * (PART_BYTES + 1)


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., bool]]:
    """Whether a server of this configuration finds a page on the disk; it keeps the page."""
    module = fake_sglang.installed(monkeypatch)
    write(tmp_path / "model")

    def one_server(extra: dict | None = None, **configuration: Any) -> bool:
        server = {"model_path": str(tmp_path / "model"), "dtype": "auto", "quantization": None, **configuration}
        monkeypatch.setattr(fake_sglang, "SERVER", server)
        tiers = f"disk://{tmp_path / 'kv'}?size=8MiB&segment=4MiB"
        config = fake_sglang.config({"tiers": tiers, "interface_v1": 1, "num_threads": 1, **(extra or {})})
        backend, pool = module.KVPageHiCache(config, {}), MadePool()
        backend.register_mem_pool_host(pool)
        is_there = backend.exists(KEY[0])
        assert backend.batch_set_v1(KEY, tokens_of(0)) == [True]
        backend.close()
        return is_there

    yield one_server


def write(folder: Path, weights: bytes = BIG) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)


def test_the_same_server_finds_its_pages_and_one_of_other_settings_does_not(found: Callable[..., bool]):
    assert not found() and found()
    for change in [
        {"quantization": "fp8"}, {"dtype": "float16"}, {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"},
        {"json_model_override_args": '{"rope_theta": 5}'}, {"load_format": "pt"},
        {"speculative_draft_model_path": __file__}, {"quantization_param_path": __file__},
    ]:  # fmt: skip
        assert not found(**change) and found(**change), change
    assert found()


def test_weights_that_are_replaced_at_their_path_find_nothing(tmp_path: Path, found: Callable[..., bool]):
    folder = tmp_path / "model"
    assert not found()
    changes: list[Callable[[], Any]] = [
        lambda: (folder / "config.json").write_text("[]"),
        lambda: (folder / "model.safetensors").write_bytes(BIG + b"w"),
        lambda: write(folder, BIG[:-1] + b"v"),  # one byte far behind, of a file of the same size
        lambda: (folder / "more.safetensors").write_bytes(b""),
        lambda: (folder / "more.safetensors").rename(folder / "other.safetensors"),
    ]
    for change in changes:
        change()
        assert not found() and found()


def test_a_name_that_is_given_stands_for_the_weights_but_not_for_the_settings(found: Callable[..., bool]):
    named = {"model": "m@1"}
    assert not found(named, model_path="one") and found(named, model_path="two", load_format=None)
    assert not found({"model": "m@2"}, model_path="two") and not found(named, model_path="two", quantization="awq")


def test_a_snapshot_of_the_hub_is_named_by_its_commit(tmp_path: Path):
    pytest.importorskip("huggingface_hub")
    for commit in ("a" * 40, "b" * 40):
        place = tmp_path / "models--you--model"
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / "main").write_text(commit)
        (place / "snapshots").mkdir(exist_ok=True)
        write(place / "snapshots" / commit)
        model = ServedModel({"model_path": "you/model", "download_dir": str(tmp_path)})
        assert model.weights() == f"hub you/model {commit}"


@pytest.mark.parametrize(
    "values, message",
    [
        (None, "SGLang does not tell where the weights are, got None"),
        ({}, "SGLang does not tell"),
        ({"model_path": "/nowhere"}, "model_path /nowhere is no folder here, nor in the hub's cache"),
        ({"model_path": "s3://bucket/model"}, "nor in the hub's cache"),
        ({"model_path": __file__, "speculative_draft_model_path": "/draft"}, "speculative_draft_model_path /draft is"),
        ({"model_path": __file__, "load_format": "remote_instance"}, "the weights come from elsewhere than the path"),
        ({"model_path": __file__, "load_format": "dummy"}, "the weights come from elsewhere than the path"),
    ],
)
def test_weights_that_cannot_be_told_must_be_named(values: dict | None, message: str):
    with pytest.raises(ValueError, match=f"model must be named in the extra config where .*{message}"):
        ServedModel(values).weights()


def test_a_dtype_that_sglang_chose_is_the_dtype_of_bytes():
    assert ServedModel({"kv_cache_dtype": "fp8_e5m2"}).kv_cache_dtype == "fp8_e5m2"
    assert ServedModel({"kv_cache_dtype": "auto"}).kv_cache_dtype is None and ServedModel().kv_cache_dtype is None
