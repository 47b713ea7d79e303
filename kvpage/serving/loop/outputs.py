"""Outputs: the tokens of a request as its caller receives them, a token at a time and as a whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Literal, NamedTuple

from kvpage.blocks.explain import Explanation
from kvpage.serving.text.token_logprobs import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One continuation of a prompt.

    Attributes:
        token_ids: The generated tokens, the stop token included, and all tokens of a stop string.
        finish_reason: "stop" (an end-of-sequence token, a stop token, a stop string, or the end of a guide), "length"
            (max_tokens), "abort" or "error".
        error: The reason of the finish reason "error"; else None.
        text: The generated text without special tokens, up to the stop string; None without a tokenizer, and with an
            error.
        stop_reason: The stop string, or the token of `stop_token_ids`, that ended it; else None.
        logprobs: One for each of token_ids; None unless SamplingParams.logprobs asked for them.
    """

    token_ids: list[int]
    finish_reason: FinishReason
    error: str | None = None
    text: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None


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
        prompt_logprobs: One for each token of the prompt, None for the first one, which follows nothing; None unless
            SamplingParams.prompt_logprobs asked for them, or where the request ended before all were computed.
        num_loaded_tokens: Tokens of `num_cached_tokens` that came from the host tier or a store for this request.
        explanation: How far the cache reached into the prompt at the first admission, and why not further. None unless
            `EngineConfig.explains_requests` asks for it, and for a prompt of which all log-probabilities are computed.
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
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_loaded_tokens: int = 0
    explanation: Explanation | None = None

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
        logprobs: Log-probabilities of the token; None unless SamplingParams.logprobs asked for them.
        stop_reason: As in Sample, set with its last token.
        text: The text of the whole sample, as in Sample, set with its last token.
    """

    request_id: str
    token_id: int | None
    sample_index: int = 0
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
    error: str | None = None
    logprobs: TokenLogprobs | None = None
    stop_reason: str | int | None = None
    text: str | None = None


NUM_UNSET = len(StepOutput._fields) - 3
"""The fields that only some tokens have."""
_as_step_output = partial(tuple.__new__, StepOutput)  # StepOutput(*fields) is a call of Python


def outputs_of_tokens(
    request_ids: Sequence[str], token_ids: Sequence[int], sample_indices: Sequence[int]
) -> list[StepOutput]:
    """Return StepOutput(request_id, token_id, sample_index) of each: a step has many that are no last ones."""
    nothing = repeat(None)
    columns = zip(request_ids, token_ids, sample_indices, *[nothing] * NUM_UNSET, strict=False)
    return list(map(_as_step_output, columns))
