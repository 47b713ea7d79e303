"""What must not be found: K and V of other weights, of another configuration, of another replica's directory."""

import logging
from typing import Any

import pytest
from support import fake_vllm
from support.fake_tiering import Tiering, config_of, disk, make_model, whole
from support.insides import store_of

from kvpage.integrations.vllm.identity.engine_facts import FACTS, engine_config, facts_of

KEYS = [bytes([number]) * 36 for number in range(1, 9)]


def tiering_of(vllm_config: Any, *args: Any, **settings: Any) -> Tiering:
    return Tiering(*args, vllm_config=vllm_config, **settings)


@pytest.fixture
def model(monkeypatch, tmp_path):
    fake_vllm.installed(monkeypatch)
    return make_model(tmp_path / "model")


def is_warm(made: Tiering) -> bool:
    """Whether all of KEYS are found; none is the other possibility."""
    found = made.load("r", KEYS)
    assert len(set(found)) == 1
    return found[0]


def test_nothing_is_found_that_was_stored_before_the_weights_changed(tmp_path, model):
    first = Tiering(model, tiers=[disk(tmp_path)])
    first.compute("r", KEYS)
    first.reset()
    assert not is_warm(first)
    first.compute("r", KEYS)
    assert is_warm(first)
    first.reset()
    assert not is_warm(first)
    first.compute("r", KEYS[:4])
    assert first.load("r", KEYS) == [True] * 4 + [False] * 4
    first.close()
    other = Tiering(model, tiers=[disk(tmp_path)])  # has the weights of the folder
    assert is_warm(other)
    other.close()


def test_a_job_under_way_belongs_to_the_weights_of_before(model):
    tiering = Tiering(model, tiers=["memory://?size=1MiB"])
    tiering.submit(KEYS, tiering.request("r"), is_load=False)
    tiering.reset()
    assert not is_warm(tiering)
    tiering.close()


def test_weights_that_never_change_may_be_kept(tmp_path, model):
    tiering = Tiering(model, tiers=[disk(tmp_path)], on_reset="keep")
    tiering.compute("r", KEYS)
    tiering.reset()
    assert is_warm(tiering)
    tiering.close()


def test_what_is_not_persistent_is_found_by_its_process_alone(tmp_path, monkeypatch):
    fake_vllm.installed(monkeypatch)
    for _ in range(2):
        tiering = Tiering("of/a-hub", tiers=[disk(tmp_path)], persistent=False)  # it needs no name of weights
        assert not is_warm(tiering)
        tiering.compute("r", KEYS)
        assert is_warm(tiering)
        tiering.close()


def test_routers_are_told_that_all_is_gone_and_learn_what_comes(model):
    tiering = Tiering(model, tiers=["memory://?size=1MiB"], publishes=True, enable_kv_events=True)

    def told() -> list[tuple[bool, list[bytes]]]:
        store_of(tiering.tier).flush()
        return [(event.removed, sorted(event.keys)) for event in tiering.tier.take_events()]

    tiering.compute("r", KEYS[:4])
    assert told() == [(False, KEYS[:4])]
    tiering.reset()
    tiering.compute("r", KEYS[2:6])
    assert told() == [(True, KEYS[:4]), (False, KEYS[2:6])]
    store_of(tiering.tier).clear()
    assert told() == [(True, KEYS[2:6])]
    tiering.close()


# --- configurations ---


def test_dtypes_of_computing_share_no_chunk_of_a_smaller_cache(tmp_path, model):
    config = config_of(model, dtype="fp8")
    for dtype, expected in (("torch.float16", False), ("torch.bfloat16", False), ("torch.float16", True)):
        tiering = tiering_of(whole(dtype=dtype), model, config=config, tiers=[disk(tmp_path)])
        assert is_warm(tiering) is expected
        tiering.compute("r", KEYS)
        tiering.close()


def test_each_fact_makes_another_header():
    values = [None, "a", {"rope": {"factor": 2.0}}, {"rope": {"factor": 4.0}}, ["layer 1"], whole, tiering_of, 1.5]
    found = {repr(facts_of(whole(**{field: value}))) for _, field in FACTS.values() for value in values}
    assert len(found) == len(FACTS) * (len(values) - 1) + 3  # None is the same for all but the two that `whole` names
    long = [facts_of(whole(hf_overrides={"x": "y" * 999, "z": number})) for number in range(2)]
    assert long[0] != long[1] and all(len(facts["hf_overrides"]) == 64 for facts in long)


def test_the_configuration_is_found_in_the_calls_under_way(caplog):
    def within(vllm_config: Any) -> Any:
        return (lambda: engine_config())()

    config = whole()
    assert within(config) is config and within("another") is None
    assert set(facts_of(None).values()) == {"unknown"} and "vLLM's configuration was not found" in caplog.text


def test_dummy_weights_are_not_those_of_the_folder(tmp_path, model, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    for named, expected in ((None, False), (None, False), ("run 1", False), ("run 1", True)):
        tiering = tiering_of(whole(load_format="dummy"), model, tiers=[disk(tmp_path)], weights=named)
        assert is_warm(tiering) is expected and ("load_format dummy" in caplog.text) == (named is None)
        caplog.clear()
        tiering.compute("r", KEYS)
        tiering.close()


def test_without_a_configuration_nothing_outlives_the_process_unless_weights_are_named(tmp_path, model, caplog):
    for named, expected in ((None, False), (None, False), ("run 1", False), ("run 1", True)):
        tiering = tiering_of("not found", model, tiers=[disk(tmp_path)], weights=named)
        assert is_warm(tiering) is expected and "vLLM's configuration was not found" in caplog.text
        tiering.compute("r", KEYS)
        tiering.close()


@pytest.mark.parametrize(
    ("algorithm", "seed", "warns"), [("sha256", None, False), ("xxhash", None, True), ("xxhash_cbor", "0", False)]
)
def test_keys_that_no_other_process_has_are_warned_of(model, monkeypatch, caplog, algorithm, seed, warns):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    with caplog.at_level(logging.WARNING):
        tiering_of(whole(prefix_caching_hash_algo=algorithm), model, tiers=["memory://?size=1MiB"]).close()
    assert ("no other process finds these chunks" in caplog.text) == warns


# --- replicas ---


def test_replicas_have_directories_of_their_own_and_read_those_of_others(tmp_path, model):
    tiers = [disk(tmp_path, "kv/{rank}"), f"disk-view://{tmp_path}/kv/*"]
    made = []
    for index in range(2):
        parallel = fake_vllm.OffloadingParallelConfig(data_parallel_index=index)
        made.append(Tiering(model, config=config_of(model, parallel=parallel), tiers=tiers))
    made[0].compute("r", KEYS)
    assert is_warm(made[1]) and sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["dp0", "dp1"]
    for one in made:
        one.close()
