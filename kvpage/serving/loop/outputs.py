"""Outputs: the tokens of a request as its caller receives them, a token at a time and as a whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One continuation of a prompt.

    Attributes:
        token_ids: The generated tokens, the stop token included.
        finish_reason: "stop" (a stop token or an end-of-sequence token), "length" (max_tokens), "abort" or "error".
        error: The reason of the finish reason "error"; else None.
    """

    token_ids: list[int]
    finish_reason: FinishReason
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The outcome of a request.

    Attributes:
        request_id: The id that `add_request` returned.
        prompt_token_ids: The prompt.
        samples: `SamplingParams.n` continuations; fewer if the request ended before its first token.
        num_cached_tokens: Leading tokens of the prompt whose K and V were in the cache at the first admission.
        arrival_time: Seconds of time.monotonic() when the request was queued.
        first_token_time: The same of its first token; None if there was none.
        finish_time: The same of its end.
        num_reused_tokens: Tokens of the prompt whose K and V came out of segments. 0 for an exact prefill.
        num_recomputed_tokens: Tokens that segments had, and that were computed again. 0 for an exact prefill.
    """

    request_id: str
    prompt_token_ids: list[int]
    samples: tuple[Sample, ...]
    num_cached_tokens: int
    arrival_time: float
    first_token_time: float | None
    finish_time: float
    num_reused_tokens: int = 0
    num_recomputed_tokens: int = 0

    @property
    def is_blended(self) -> bool:
        """Whether segments were used: the tokens are near those of a full prefill, and need not be the same."""
        return self.num_reused_tokens + self.num_recomputed_tokens > 0

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first sample."""
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """The finish reason of the first sample."""
        return self.samples[0].finish_reason

    @property
    def error(self) -> str | None:
        """The reason of the first sample that ended in an error; None if none did."""
        return next((sample.error for sample in self.samples if sample.error is not None), None)


class StepOutput(NamedTuple):
    """The token that a step gave a request, or the error that ended it.

    Attributes:
        request_id: The id of the request.
        token_id: The new token; None with an error.
        sample_index: The sample that the token belongs to.
        finish_reason: Set with the last token of the sample, and with its error; else None.
        output: Set with the last token, or the error, of the request's last sample; else None.
        error: The reason of the finish reason "error"; else None.
    """

    request_id: str
    token_id: int | None
    sample_index: int = 0
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
    error: str | None = None


_as_step_output = partial(tuple.__new__, StepOutput)  # StepOutput(*fields) is a call of Python


def outputs_of_tokens(
    request_ids: Sequence[str], token_ids: Sequence[int], sample_indices: Sequence[int]
) -> list[StepOutput]:
    """Return StepOutput(request_id, token_id, sample_index) of each: a step has many that are no last ones."""
    nothing = repeat(None)
    columns = zip(request_ids, token_ids, sample_indices, nothing, nothing, nothing, strict=False)
    return list(map(_as_step_output, columns))
