"""The backend under SGLang's HybridCacheController, and names of weights by SGLang's own configuration.

`tests/integrations/run.sh sglang` runs this; elsewhere it skips.
"""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from integrations.sglang import real_pools
from integrations.sglang.real_pools import EngineSide, HybridSide, filled, mamba_pool, mha_pool, page_of
from support.insides import store_of

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs sglang: tests/integrations/run.sh sglang", allow_module_level=True)
pytestmark = [pytest.mark.routers, pytest.mark.filterwarnings("ignore")]
BACKEND = {
    "backend_name": "kvpage", "module_path": "kvpage.integrations.sglang.backend", "class_name": "KVPageHiCache",
    "interface_v1": 1, "model": "model@1",
}  # fmt: skip
TOKENS = list(range(1000, 1000 + 4 * 20))


@pytest.fixture(scope="module", autouse=True)
def sglang() -> None:
    real_pools.without_images()
    real_pools.without_reserve()


def on_disk(path: Path) -> dict[str, Any]:
    return {**BACKEND, "tiers": f"disk://{path}?size=16MiB&segment=8MiB"}


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Callable[[], HybridSide]]:
    """A process of its own over one disk: the one before it ends first."""
    made: list[HybridSide] = []

    def opened() -> HybridSide:
        for one in made:
            one.close()
        seed = len(made) + 1
        made[:] = [HybridSide(filled(mha_pool("page_first"), seed), filled(mamba_pool(), seed), on_disk(tmp_path))]
        return made[0]

    yield opened
    for one in made:
        one.close()


def test_pages_and_the_state_at_their_end_come_back_in_another_process(side: Callable[[], HybridSide]):
    first = side()
    keys = first.hit_with_state(TOKENS).all_hash_values
    wanted, states = (
        [page_of(first.pool, page) for page in range(6)],
        [page_of(first.states, 3), page_of(first.states, 5)],
    )
    assert first.keep_with_state([0, 1, 2], keys[:3], 3) == 12
    assert first.keep_with_state([3, 4, 5], keys[3:6], 5) == 12
    second = side()
    operation = second.hit_with_state(TOKENS)
    assert operation.storage_hit_count == 24
    assert second.fetch_with_state(operation, list(range(40, 46)), 77) == (24, 1)
    assert [page_of(second.pool, page) for page in range(40, 46)] == wanted
    assert page_of(second.states, 77) == states[1]
    operation = second.hit_with_state(TOKENS[:20])
    assert operation.storage_hit_count == 12, "pages reach further, and no state ends there"
    assert second.fetch_with_state(operation, [50, 51, 52], 78) == (12, 1)
    assert page_of(second.states, 78) == states[0]


def test_a_store_in_trouble_costs_a_miss_and_no_thread(side: Callable[[], HybridSide], monkeypatch: pytest.MonkeyPatch):
    made = side()
    keys = made.hit_with_state(TOKENS).all_hash_values
    assert made.keep_with_state([0, 1, 2], keys[:3], 3) == 12
    operation, storage = made.hit_with_state(TOKENS), made.controller.storage_backend._storage

    def fails(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as trouble:
        for name in ("contains", "get_into", "put"):
            trouble.setattr(store_of(storage), name, fails)
        assert made.fetch_with_state(operation, [40, 41, 42], 77) == (0, 0)
        assert made.hit_with_state(TOKENS).storage_hit_count == 0
        assert made.keep_with_state([3, 4, 5], keys[3:6], 5) == 0
    assert made.keep_with_state([3, 4, 5], keys[3:6], 5) == 12
    assert made.fetch_with_state(made.hit_with_state(TOKENS), list(range(40, 46)), 77) == (24, 1)


def test_weights_are_named_by_sglangs_own_configuration(tmp_path: Path):
    from sglang.srt.runtime_context import get_context

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    extra = {**on_disk(tmp_path / "kv"), "model": None}

    def hits(**configuration: Any) -> int:
        with get_context().override_server_args(model_path=str(model), **configuration):
            made = EngineSide(mha_pool("page_first"), dict(extra))
        operation = made.hit(TOKENS)
        assert made.keep(list(range(20)), operation.all_hash_values) == 80
        made.close()
        return operation.storage_hit_count

    assert (hits(), hits()) == (0, 80)
    for change in ({"quantization": "fp8"}, {"kv_cache_dtype": "fp8_e5m2"}, {"json_model_override_args": '{"a": 1}'}):
        assert (hits(**change), hits(**change)) == (0, 80)
    (model / "model.safetensors").write_bytes(b"other weights")
    assert (hits(), hits()) == (0, 80)
    with pytest.raises(ValueError, match="model must be named in the extra config where SGLang does not tell"):
        EngineSide(mha_pool("page_first"), dict(extra))
