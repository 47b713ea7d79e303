"""A step reaches the model in few calls, which a reader of the loop follows from `Engine.step` on."""

import sys
from types import FrameType

import pytest
from support.models import make_model

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams

MOST = 8


def calls_to_the_model(engine: Engine) -> list[str]:
    """Return kvpage's functions between a call of `step` and the model's forward, the first one first."""
    calls: list[str] = []

    def note(frame: FrameType | None, event: str, arg: object) -> None:
        is_model = event == "call" and frame is not None and frame.f_code.co_name == "forward"
        if not is_model or "modeling_llama" not in frame.f_code.co_filename or calls:
            return
        while frame is not None:
            if "kvpage/serving" in frame.f_code.co_filename and "tests" not in frame.f_code.co_filename:
                calls.insert(0, frame.f_code.co_name)
            frame = frame.f_back

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("num_steps_before", [0, 3])
def test_a_step_reaches_the_model_in_few_calls(num_steps_before: int) -> None:
    """Of a prompt, and of a decode."""
    engine = Engine.from_model(make_model("llama"), EngineConfig(CacheConfig(4, 64)))
    engine.add_request([1] * 9, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    for _ in range(num_steps_before):
        engine.step()
    calls = calls_to_the_model(engine)
    assert calls and calls[0] == "step" and len(calls) <= MOST, calls
