"""Walks through kvpage: the functions that a call enters, over tiny models.

a prompt      Engine.add_request ─► the queue
a step        Engine.step ─► the model's own code
a chat        the body of a POST ─► its answer, on the event loop's thread

`python tests/support/walks.py` prints their sizes, and with -v their functions.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.models import make_model  # noqa: E402

import kvpage  # noqa: E402
from kvpage import CacheConfig  # noqa: E402
from kvpage.checks.interrupts import HeldInterrupts  # noqa: E402
from kvpage.serving import Engine, EngineConfig, SamplingParams  # noqa: E402

PACKAGE = str(Path(kvpage.__file__).parent)


@dataclass
class Walk:
    """The functions of kvpage that one thread has entered, with the number of calls of each."""

    calls: Counter[CodeType] = field(default_factory=Counter)

    @property
    def functions(self) -> list[str]:
        """Each function once, by file and name, in the order of the first calls."""
        return [f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}" for code in self.calls]

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(function.partition(":")[0] for function in self.functions))


def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE)


@contextmanager
def profiled(note: Callable[[FrameType], object]):
    """Inside, call `note` with the frame of each Python function that this thread enters."""
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: note(frame) if event == "call" else None)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def walked():
    """Yield the walk of the calls inside."""
    walk = Walk()
    with profiled(lambda frame: walk.calls.update([frame.f_code] if is_ours(frame.f_code) else [])):
        yield walk


def make_engine() -> Engine:
    return Engine.from_model(make_model("llama"), EngineConfig(CacheConfig(4, 64)))


def walk_of_a_prompt() -> Walk:
    """Walk from `add_request` to the queue. The engine has had a request with the same parameters before."""
    engine, params = make_engine(), SamplingParams(max_tokens=8, temperature=0)
    engine.add_request([1] * 9, params)
    with walked() as walk:
        engine.add_request([2] * 9, params)
    return walk


def hops_of_a_step(num_steps_before: int) -> list[str]:
    """Return the functions on the stack of a step when it enters the model's own code, the first one first."""
    engine, hops = make_engine(), []
    engine.add_request([1] * 9, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    for _ in range(num_steps_before):
        engine.step()

    def note(frame: FrameType | None) -> None:
        is_model = frame.f_code.co_name == "forward" and "modeling_llama" in frame.f_code.co_filename
        while is_model and not hops_done(hops) and frame is not None:
            hops.insert(0, frame.f_code)
            frame = frame.f_back

    with profiled(note):
        engine.step()
    return [code.co_qualname for code in hops if is_ours(code)]


def hops_done(hops: list[CodeType]) -> bool:
    return bool(hops) and hops[0].co_name == "<module>"


def guards_of(call: Callable[[], object]) -> int:
    """Return how often a call holds interrupts back, once for each HeldInterrupts."""
    with walked() as walk:
        call()
    return walk.calls[HeldInterrupts.__enter__.__code__]


def walk_of_a_chat() -> Walk:
    """Walk through a chat over HTTP on the thread of the event loop. The server has answered a chat before."""
    from support.server_app import NAME, running_server

    body = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}

    async def chat(server) -> Walk:
        async with server.client() as client:
            await client.post("/v1/chat/completions", json=body)
            with walked() as walk:
                response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return walk

    with running_server() as server:
        return asyncio.run(chat(server))


def main() -> None:
    prompt, chat = walk_of_a_prompt(), walk_of_a_chat()
    print(f"a prompt: {len(prompt.functions)} functions, {len(prompt.files)} files")
    for num_steps_before, step in ((0, "a prompt"), (3, "a decode")):
        print(f"a step of {step}: {len(hops_of_a_step(num_steps_before))} hops")
    print(f"a chat: {len(chat.functions)} functions, {len(chat.files)} files")
    if "-v" in sys.argv:
        print(*prompt.functions, "", *hops_of_a_step(3), "", *chat.functions, sep="\n")


if __name__ == "__main__":
    main()
