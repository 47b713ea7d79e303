"""sampling_params: the fields of a request as SamplingParams of the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpage.server.config import MAX_HINTED_PRIORITY, ServerConfig
from kvpage.server.protocol.errors import bad_request, checked
from kvpage.server.protocol.sampling_fields import SamplingFields
from kvpage.serving import Guide, SamplingParams
from kvpage.serving.params.sampling import MAX_RETAIN_PRIORITY

SAME_NAMES = (
    "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos", "n",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits and defaults of a model.

    Attributes:
        max_model_len: Tokens of a request at most, generated ones included, by the model and by the blocks.
        temperature: For requests that have none: that of a model that states how it samples, else 1.
        max_retain_priority: Priority of a prompt's blocks that a hint may ask for at most.
    """

    max_model_len: int
    temperature: float
    max_retain_priority: int


def sampling_params(
    request: SamplingFields, lengths: Sequence[int], guide: Guide | None, model: ModelLimits
) -> list[SamplingParams]:
    """Return the parameters of each prompt, by its length. ApiError 400 for a value that a field does not take.

    They are made once for all prompts that generate equally many tokens.
    """
    most = [request.most_tokens(max(model.max_model_len - length, 1)) for length in lengths]
    made = {max_tokens: _sampling_params(request, max_tokens, guide, model) for max_tokens in set(most)}
    return [made[max_tokens] for max_tokens in most]


def _sampling_params(
    request: SamplingFields, max_tokens: int, guide: Guide | None, model: ModelLimits
) -> SamplingParams:
    fields: dict[str, Any] = {name: getattr(request, name) for name in SAME_NAMES}
    fields["temperature"] = model.temperature if request.temperature is None else request.temperature
    fields["top_k"] = 0 if request.top_k == -1 else request.top_k
    fields["seed"] = None if request.seed is None else request.seed % 2**63
    if request.min_tokens is not None and request.min_tokens > max_tokens:
        message = f"min_tokens must be at most max_tokens={max_tokens}, got {request.min_tokens}"
        raise bad_request(message, param="min_tokens")
    fields["max_tokens"] = max_tokens
    fields["stop"] = request.stop_strings or None
    fields["stop_token_ids"] = request.stop_token_ids or ()
    fields["logit_bias"] = _biases(request.logit_bias)
    fields["include_stop_str_in_output"] = request.include_stop_str_in_output
    fields["logprobs"], fields["prompt_logprobs"] = request.num_logprobs, request.num_prompt_logprobs
    fields["guide"] = guide
    if request.kv_hints is not None:
        retained = min(request.kv_hints.retain_priority(), model.max_retain_priority)
        fields["retain_priority"] = -(-retained * MAX_RETAIN_PRIORITY // MAX_HINTED_PRIORITY)
    named_fields = {name: value for name, value in fields.items() if value is not None}
    return checked(lambda: SamplingParams(**named_fields))


def _biases(biases: dict[str, float] | None) -> dict[int, float] | None:
    if not biases:
        return None
    for name in biases:
        if not name.isascii() or not name.isdecimal() or len(name) > 10:
            raise bad_request(f"logit_bias must have token ids as its keys, got {name[:40]!r}", param="logit_bias")
    return {int(name): value for name, value in biases.items()}


def check_limits(request: SamplingFields, config: ServerConfig, max_num_waiting: int) -> None:
    """Raise ApiError 400 for a request beyond the server's limits. max_num_waiting: of the engine's queue."""
    stops = request.stop_strings
    longest = max(map(len, stops), default=1)
    for name, value, most, rule in (
        ("n", request.n, config.max_n, "at most"),
        ("prompt", request.num_prompts, config.max_prompts, "a batch of at most"),
        ("prompt", request.num_prompts, max_num_waiting, "a batch of at most max_num_waiting ="),
        ("stop", len(stops), config.max_stop_strings, "a list of at most"),
        ("stop", longest, config.max_stop_characters, "strings of at most"),
        (request.logprobs_field, request.num_logprobs or 0, config.max_logprobs, "at most"),
    ):  # fmt: skip
        if value > most:
            raise bad_request(f"{name} must be {rule} {most}, got {value}", param=name)
    if "" in stops:
        raise bad_request("stop must hold no empty string", param="stop")
