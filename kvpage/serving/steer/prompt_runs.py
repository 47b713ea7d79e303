"""Prompt runs: prompts that their caller waits for, while other requests go on.

run_to_ends    queue all ─► step until each has ended ─► outputs, in the order of the prompts
stream_of      queue one ─► step whenever the caller asks for a token
"""

from collections import deque
from collections.abc import Callable, Sequence

from kvpage.checks.interrupts import HeldInterrupts
from kvpage.serving.loop.intake import Prompt
from kvpage.serving.loop.outputs import RequestOutput, StepOutput
from kvpage.serving.loop.request import Request
from kvpage.serving.loop.serving_loop import ServingLoop
from kvpage.serving.loop.token_stream import TokenStream

Add = Callable[[Prompt], Request]
"""Checks a prompt, and queues its request; see Engine.add_request."""


def run_to_ends(
    loop: ServingLoop, add: Add, prompts: Sequence[Prompt], progress: Callable[[int], object] | None = None
) -> list[RequestOutput]:
    """Run prompts to their ends. If anything raises, they are aborted. progress: see Engine.generate."""
    sink: deque[StepOutput] = deque()
    outputs: dict[str, RequestOutput] = {}
    requests: list[Request] = []
    try:
        with HeldInterrupts():
            for prompt in prompts:
                requests.append(add(prompt._replace(sink=sink)))
        while len(outputs) < len(requests):
            loop.step_until(sink, requests)
            finished = {output.request_id: output.output for output in sink if output.output}
            sink.clear()
            outputs.update(finished)
            if finished and progress is not None:
                progress(len(finished))
    finally:
        loop.drop(*requests)
    return [outputs[request.request_id] for request in requests]


def stream_of(loop: ServingLoop, add: Add, prompt: Prompt) -> TokenStream:
    """Return the tokens of a prompt of one sample, which are computed as the caller asks for them."""
    sink: deque[StepOutput] = deque()

    def take() -> StepOutput:
        loop.step_until(sink, [request])
        return sink.popleft()

    with HeldInterrupts():
        request = add(prompt._replace(sink=sink))
        return TokenStream(take, lambda: loop.drop(request), lambda: loop.forget(request))
