"""GenerationRequest: a request of Dynamo's frontend, in kvpage's terms.

| part | read |
|---|---|
| token_ids | the prompt; after a migration, with the tokens that another worker has generated |
| sampling_options | into SamplingParams; the form of the answer as a Guide |
| stop_conditions | into SamplingParams; stop strings are left to the frontend, which has the text |
| output_options | log-probabilities; the rest is the frontend's |
| routing | the cache salt as the namespace; the priority |
| kv_hint | how long to keep the prompt's blocks; see hints.py |

Anything else that changes tokens is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpage.integrations.dynamo.hints import CacheHints, read_hints
from kvpage.serving import Guide, SamplingParams

SAME_NAMES = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
READ_SAMPLING = {
    *SAME_NAMES, "n", "best_of", "top_k", "seed", "include_stop_str_in_output", "logit_bias", "guided_decoding",
}  # fmt: skip
GUIDES: dict[str, Callable[[Any], Guide]] = {
    "json": Guide.json_schema,
    "regex": Guide.regex,
    "choice": Guide.choice,
    "grammar": Guide.grammar,
}
ASKED_STOPS = ("stop_token_ids", "stop_token_ids_visible")
READ_STOPS = {"max_tokens", "min_tokens", "ignore_eos", "stop", *ASKED_STOPS, "stop_token_ids_hidden"}
UNSERVED = ("multi_modal_data", "mm_processor_kwargs", "prompt_embeds", "encoder_result")
MAX_PRIORITY = 2**31 - 1
SALT_PREFIX = "dynamo-cache-salt:"  # by which Dynamo's router finds the salt among the keys of an event


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """The defaults that complete a request.

    Attributes:
        max_model_len: Tokens of prompt and answer at most.
        temperature: That of requests that name none.
    """

    max_model_len: int
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request that was read.

    Attributes:
        tokens: The prompt.
        params: The rules of its tokens.
        namespace: The tenant, by whose salt cached blocks are apart.
        priority: Requests with a lower number run first. Dynamo's number is the negative of it.
        shows_ids: Whether tokens beside log-probabilities are named by their ids.
        hints: How long the prompt's blocks are to be kept.
    """

    tokens: list[int]
    params: SamplingParams
    namespace: bytes
    priority: int
    shows_ids: bool
    hints: CacheHints


def read_request(request: Mapping[str, Any], defaults: RequestDefaults) -> GenerationRequest:
    """Read a request.

    Args:
        request: Dynamo's GenerateRequest.
        defaults: For fields that it lacks.

    Returns:
        The request in kvpage's terms.

    Raises:
        ValueError: A field is not served, or has a value that it does not take.
    """
    for name in UNSERVED:
        _refuse(name, request.get(name))
    sampling, stops = _part(request, "sampling_options"), _part(request, "stop_conditions")
    output, routing = _part(request, "output_options"), _part(request, "routing")
    _refuse("routing.lora_name", routing.get("lora_name"))
    _check_names("sampling_options", sampling, READ_SAMPLING)
    _check_names("stop_conditions", stops, READ_STOPS)
    tokens = read_tokens(request.get("token_ids"))
    room = max(defaults.max_model_len - len(tokens), 1)
    hints = read_hints(request.get("kv_hint"))
    params = SamplingParams(
        **_sampling_fields(sampling, defaults),
        **_stop_fields(stops, request.get("eos_token_ids") or ()),
        max_tokens=room if stops.get("max_tokens") is None else stops["max_tokens"],
        **_logprob_fields(output),
        retain_priority=hints.retain_priority,
    )
    salt = routing.get("cache_salt")
    priority = int(routing.get("priority") or 0)
    return GenerationRequest(
        tokens,
        params,
        (SALT_PREFIX + salt).encode() if salt else b"",
        -max(-MAX_PRIORITY, min(priority, MAX_PRIORITY)),
        bool(output.get("return_tokens_as_token_ids")),
        hints,
    )


def read_tokens(token_ids: Any) -> list[int]:
    """Return token ids as a list.

    Args:
        token_ids: A sequence, or packed little-endian int32.

    Raises:
        ValueError: There are none, or the bytes are no whole numbers.
    """
    if token_ids is None:
        raise ValueError("token_ids must be given")
    if isinstance(token_ids, bytes | bytearray | memoryview):
        if len(token_ids) % 4:
            raise ValueError(f"token_ids must be whole int32, got {len(token_ids)} bytes")
        packed: list[int] = np.frombuffer(token_ids, "<i4").tolist()
        return packed
    return list(token_ids)


def _sampling_fields(sampling: Mapping[str, Any], defaults: RequestDefaults) -> dict[str, Any]:
    for name in ("n", "best_of"):  # Dynamo's frontend ends the stream where the first sample ends
        if sampling.get(name) not in (None, 1):
            raise ValueError(f"sampling_options.{name} must be 1, got {sampling[name]!r}: ask several times")
    fields = {name: sampling[name] for name in SAME_NAMES if sampling.get(name) is not None}
    fields.setdefault("temperature", defaults.temperature)
    if sampling.get("top_k") is not None:
        fields["top_k"] = max(sampling["top_k"], 0)  # -1 means all, too
    if sampling.get("seed") is not None:
        fields["seed"] = sampling["seed"] % 2**63
    if sampling.get("logit_bias") is not None:
        fields["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
    return {**fields, "guide": _guide(sampling.get("guided_decoding") or {})}


def _guide(options: Mapping[str, Any]) -> Guide | None:
    """Return the form of the answer; None for any. The backend is not looked at: there is one."""
    named = {name: value for name, value in options.items() if value is not None and name != "backend"}
    for name, value in named.items():
        if name not in GUIDES:
            _refuse(f"sampling_options.guided_decoding.{name}", value)
    forms = [name for name in GUIDES if name in named]
    if len(forms) > 1:
        raise ValueError(f"sampling_options.guided_decoding must name one form, got {', '.join(forms)}")
    return GUIDES[forms[0]](named[forms[0]]) if forms else None


def _stop_fields(stops: Mapping[str, Any], eos_token_ids: Sequence[int]) -> dict[str, Any]:
    asked = dict.fromkeys(token for name in ASKED_STOPS for token in stops.get(name) or ())
    ignore_eos, hidden = bool(stops.get("ignore_eos")), stops.get("stop_token_ids_hidden") or ()
    added = (token for token in hidden if not (ignore_eos and token in eos_token_ids))  # the model's own among them
    token_ids = dict.fromkeys((*asked, *added))
    fields: dict[str, Any] = {"stop_token_ids": tuple(token_ids), "ignore_eos": ignore_eos}
    if stops.get("min_tokens") is not None:
        fields["min_tokens"] = stops["min_tokens"]
    return fields


def _logprob_fields(output: Mapping[str, Any]) -> dict[str, Any]:
    names = ("logprobs", "prompt_logprobs")
    return {name: output[name] for name in names if output.get(name) is not None}


def _part(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return request.get(name) or {}


def _check_names(part: str, values: Mapping[str, Any], read: set[str]) -> None:
    for name, value in values.items():
        if name not in read:
            _refuse(f"{part}.{name}", value)


def _refuse(name: str, value: Any) -> None:
    is_absent = value is None or value is False or (isinstance(value, Mapping | Sequence) and not value)
    if not is_absent:
        raise ValueError(f"{name} is not served by kvpage's workers, got {value!r}")
