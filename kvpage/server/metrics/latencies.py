"""Latencies: how long requests wait for their tokens."""

from collections import Counter

from kvpage.observe.histogram import Histogram
from kvpage.serving.loop.outputs import RequestOutput

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
               80.0, 160.0, 640.0, 2560.0)  # fmt: skip
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
"""The ranges that vLLM has, so that its dashboards fit."""


class Latencies:
    """Times of requests that have ended, and between the tokens of streams. For the thread of the event loop.

    first_token: seconds from a request's arrival to its first token. between_tokens: between two outputs of a stream.
    per_token: the mean of a request, without its first token. whole: from arrival to end. finish_reasons: of samples.
    """

    def __init__(self) -> None:
        self.first_token, self.between_tokens = Histogram(FIRST_TOKEN), Histogram(PER_TOKEN)
        self.per_token, self.whole = Histogram(PER_TOKEN), Histogram(WHOLE)
        self.finish_reasons: Counter[str] = Counter()

    def next_tokens(self, seconds: float) -> None:
        """Count the time between two outputs of a stream."""
        self.between_tokens.observe(seconds)

    def ended(self, output: RequestOutput) -> None:
        """Count a request that has ended."""
        self.finish_reasons.update(sample.finish_reason for sample in output.samples)
        self.whole.observe(output.finish_time - output.arrival_time)
        if output.first_token_time is None:
            return
        self.first_token.observe(output.first_token_time - output.arrival_time)
        num_later = max((len(sample.token_ids) for sample in output.samples), default=0) - 1
        if num_later > 0:
            self.per_token.observe((output.finish_time - output.first_token_time) / num_later)
