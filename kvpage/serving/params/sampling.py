"""SamplingParams: the rules by which the tokens of one request are chosen, and its end."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvpage.checks import fields as checks
from kvpage.checks.fields import is_int
from kvpage.serving.params.generation_defaults import Unserved, call_fields
from kvpage.serving.params.guide import Guide
from kvpage.serving.params.logits import LogitsParams

MAX_SEED = 2**63 - 1
MAX_RETAIN_PRIORITY = 7
DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 20
CHECKS: dict[str, checks.Check] = {
    "max_tokens": checks.POSITIVE,
    "temperature": checks.real("finite and not negative", lambda value: 0 <= value < float("inf")),
    "top_k": checks.at_least(0, "a positive integer, or 0 for all tokens"),
    "top_p": checks.real("in (0, 1]", lambda value: 0 < value <= 1),
    "min_p": checks.real("in [0, 1]", lambda value: 0 <= value <= 1),
    "top_h": checks.real("in (0, 1]", lambda value: 0 < value <= 1),
    "typical_p": checks.real("in (0, 1]", lambda value: 0 < value <= 1),
    "epsilon_cutoff": checks.real("in [0, 1)", lambda value: 0 <= value < 1),
    "eta_cutoff": checks.real("in [0, 1)", lambda value: 0 <= value < 1),
    "n": checks.POSITIVE,
    "ignore_eos": checks.flag,
    "stop_token_ids": checks.token_ids,
    "stop": checks.texts,
    "include_stop_str_in_output": checks.flag,
    "logprobs": checks.between(0, MAX_LOGPROBS),
    "prompt_logprobs": checks.between(0, MAX_LOGPROBS),
}


@dataclass(frozen=True, slots=True)
class SamplingParams(LogitsParams):
    """The rules of one request, frozen and validated. The same object may serve many requests.

    LogitsParams documents the other fields: they change the logits. None takes the default of the model's generation
    config; each field names its default where that has none.

    Args:
        max_tokens: the most tokens that are generated. Default 16.
        temperature: 0, the default, takes the likeliest token. Above 0, tokens are drawn from
            softmax(logits / temperature).
        top_k: only the k likeliest tokens can be drawn, and those as likely as the last of them. 0 for all.
        top_p: only the likeliest tokens whose probabilities make up `top_p` can be drawn, and those as likely as the
            last of them. 1 for all.
        seed: a request with a seed draws the same tokens, whatever else runs; not always with a model in bf16 whose
            layers keep states. None: a new seed for each request.
        stop_token_ids: a request ends at the first of these, which is the last token of its output.
        ignore_eos: do not end at the end-of-sequence tokens of the model's generation config.
        retain_priority: 0 to 7. Cached blocks of requests with a higher one are evicted later. It says nothing of the
            order in which requests run: that is `priority` of `Engine.add_request`.
        n: the number of samples of one prompt, which is computed once. Sample i draws as a request with the seed
            `seed + i`. With a temperature of 0 all are equal.
        min_p: only tokens of at least `min_p` times the likeliest one's probability can be drawn.
        top_h: as in transformers' GenerationConfig.
        typical_p: as in transformers' GenerationConfig.
        epsilon_cutoff: as in transformers' GenerationConfig.
        eta_cutoff: as in transformers' GenerationConfig.
        stop: a request ends where its text has the first of these strings, also amid a token. They
            need the tokenizer given to `Engine.from_model`. Strings within the first `min_tokens` tokens do not count.
        include_stop_str_in_output: end `Sample.text` after the stop string, not before it.
        logprobs: return the log-probability of each generated token, and the ids and log-probabilities of that many
            likeliest ones, at most 20; 0 for the generated one alone. They are log_softmax in fp32 of the model's own
            logits: before penalties, masks and temperature.
        prompt_logprobs: return the same for the tokens of the prompt. All of it is computed then, cached or not.
        guide: the form that the generated text must have; see Guide.
        adapter: the name of an adapter that `Engine.load_adapter` has loaded. None: the base model.

    Raises:
        ValueError: for a value that a field does not take, with the field's name.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    retain_priority: int = 0
    n: int = 1
    min_p: float | None = None
    top_h: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guide: Guide | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        LogitsParams.__post_init__(self)
        checks.check_given(self, ("n", "ignore_eos", "stop_token_ids", "stop", "include_stop_str_in_output"))
        checks.check_fields(self, CHECKS)
        if self.seed is not None and not (is_int(self.seed) and 0 <= self.seed <= MAX_SEED):
            raise ValueError(f"seed must be an integer in [0, 2**63), got {self.seed!r}")
        if not is_int(self.retain_priority) or not 0 <= self.retain_priority <= MAX_RETAIN_PRIORITY:
            limits = f"[0, {MAX_RETAIN_PRIORITY}]"
            raise ValueError(f"retain_priority must be an integer in {limits}, got {self.retain_priority!r}")
        if self.guide is not None and not isinstance(self.guide, Guide):
            raise ValueError(f"guide must be a Guide, such as Guide.regex(...), got {type(self.guide).__name__}")
        if not isinstance(self.adapter, str | None):
            raise ValueError(f"adapter must be a name or None, got {type(self.adapter).__name__}")

    @classmethod
    def from_generation_config(
        cls, generation_config: Any, unserved: Unserved = "refuse", **changes: Any
    ) -> "SamplingParams":
        """Make the parameters by which `model.generate` samples with this GenerationConfig and no other arguments.

        Args:
            generation_config: transformers' GenerationConfig.
            unserved: "refuse" raises for fields that kvpage does not serve; "ignore" leaves them out.
            changes: fields that replace those of the config.

        Returns:
            The parameters.

        Raises:
            ValueError: for a field that is not served, or a value that a field does not take, with the field's name.
        """
        return cls(**{**call_fields(generation_config, unserved), **changes})

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, and nothing is drawn."""
        return not self.temperature


def check_params(params: SamplingParams) -> SamplingParams:
    """Return `params`. Raises TypeError unless they are SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params must be SamplingParams, got {type(params).__name__}")
    return params


def params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams | None]:
    """Return one element for each prompt, of one for all or one for each. The elements are not checked."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Iterable):
        raise TypeError(f"params must be SamplingParams, or one a prompt, got {type(params).__name__}")
    params_list = list(params)
    if len(params_list) != num_prompts:
        raise ValueError(f"params must be one, or one a prompt, got {len(params_list)} for {num_prompts} prompts")
    return params_list
