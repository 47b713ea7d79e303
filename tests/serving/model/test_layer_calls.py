"""How many functions of kvpage a layer of a decode step enters on a CPU."""

import sys
from collections import Counter
from types import FrameType

import pytest

transformers = pytest.importorskip("transformers")

from support.models import COMMON, make_model  # noqa: E402

from kvpage import CacheConfig  # noqa: E402
from kvpage.serving import Engine, EngineConfig, SamplingParams  # noqa: E402

MAX_CALLS = {False: 25, True: 160}  # of attention alone; with native layers, of eight operations more


def calls_of_a_step(kind: str, num_layers: int, native_layers: bool, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Functions of kvpage that a decode step of three sequences enters, of Python's own making included."""
    monkeypatch.setitem(COMMON, "num_hidden_layers", num_layers)
    config = EngineConfig(CacheConfig(block_size=4, num_gpu_blocks=64), native_layers=native_layers)
    engine = Engine.from_model(make_model(kind), config)
    for first in range(3):
        engine.add_request([first + token for token in range(1, 8)], SamplingParams(max_tokens=20))
    for _ in range(3):
        engine.step()
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.split(".")[0] == "kvpage":
            calls[f"{module}.{frame.f_code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        engine.step()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("native_layers", MAX_CALLS)
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_a_layer_enters_few_functions(kind: str, native_layers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer, more = (calls_of_a_step(kind, num_layers, native_layers, monkeypatch) for num_layers in (2, 4))
    each = {name: (count - fewer[name]) / 2 for name, count in more.items() if count != fewer[name]}
    assert 0 < sum(each.values()) <= MAX_CALLS[native_layers], each
