"""The moments at which served tokens come: tokens a second, time to the first token, time between tokens."""

import itertools
import time
from typing import Any, NamedTuple

import numpy as np

from kvpage.benchmarks.hf_ways import batched, generation
from kvpage.benchmarks.serving_workloads import Prompts, Tokens
from kvpage.serving import Engine, SamplingParams


class Moments(NamedTuple):
    """tokens: of each request. begin: when all were asked for. times: of each request's tokens, on the same clock."""

    tokens: Tokens
    begin: float
    times: list[list[float]]

    @property
    def seconds(self) -> float:
        return max(map(max, self.times)) - self.begin

    def summary(self) -> dict[str, float]:
        """Return tokens a second; milliseconds to the first token and between two, as median and 99th percentile."""
        first = [1e3 * (each[0] - self.begin) for each in self.times]
        between = [1e3 * (b - a) for each in self.times for a, b in itertools.pairwise(each)] or [0.0]
        summary = {"tokens/s": sum(map(len, self.tokens)) / self.seconds}
        for name, values in (("ttft", first), ("between", between)):
            summary[f"{name} ms"], summary[f"{name} p99 ms"] = np.percentile(values, (50, 99)).tolist()
        return summary


def serve_kvpage(engine: Engine, prompts: Prompts, max_tokens: int) -> Moments:
    """Ask for all at once, and step until all are answered."""
    engine.reset_prefix_cache()
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    begin = time.perf_counter()
    tokens: dict[str, list[int]] = {engine.add_request(prompt, params): [] for prompt in prompts}
    times: dict[str, list[float]] = {request_id: [] for request_id in tokens}
    while engine.has_unfinished:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.token_id is None:
                raise SystemExit(f"kvpage ended a request: {output.error}")
            tokens[output.request_id].append(output.token_id)
            times[output.request_id].append(now)
    return Moments(list(tokens.values()), begin, list(times.values()))


def serve_generate_batch(model: Any, batched_tokens: int, prompts: Prompts, max_tokens: int) -> Moments:
    """Serve by transformers' continuous batching. It captures graphs before the first request; that is not counted."""
    is_cuda = model.device.type == "cuda"
    outputs = batched(model, prompts, generation(max_tokens), batched_tokens, record_timestamps=True, warmup=is_cuda)
    begin = min(output.created_time for output in outputs)
    return Moments([list(one.generated_tokens) for one in outputs], begin, [list(one.timestamps) for one in outputs])
