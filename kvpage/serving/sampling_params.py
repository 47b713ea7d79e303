"""SamplingParams: how the tokens of one request are chosen, and when it ends."""

import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_SEED = 2**63 - 1
MAX_PRIORITY = 7


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Frozen and validated; one may serve many requests.

    max_tokens: how many tokens are generated at most.
    temperature: 0 takes the likeliest token; above 0, tokens are drawn from softmax(logits / temperature).
    top_k: only the k likeliest tokens can be drawn; 0 for all.
    top_p: only the likeliest tokens whose probabilities make up `top_p` can be drawn; 1 for all.
    seed: the same seed gives the same tokens whatever else runs beside the request. None: a new one a request.
    stop_token_ids: a request ends with the first of these; it is the last token of the output.
    ignore_eos: do not end with the end-of-sequence tokens of the model's generation config.
    priority: 0 to 7; what requests of a higher one leave in the cache is evicted later.
    n: samples of one prompt, which is computed once; sample i draws what a request with the seed `seed + i` would.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    priority: int = 0
    n: int = 1

    def __post_init__(self) -> None:
        if not is_int(self.max_tokens) or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be a positive integer, got {self.max_tokens!r}")
        for name in ("temperature", "top_p"):
            if not isinstance(getattr(self, name), numbers.Real):
                raise ValueError(f"{name} must be a number, got {type(getattr(self, name)).__name__}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature!r}")
        if not is_int(self.top_k) or self.top_k < 0:
            raise ValueError(f"top_k must be a positive integer, or 0 for all tokens, got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r}")
        if self.seed is not None and not (is_int(self.seed) and 0 <= self.seed <= MAX_SEED):
            raise ValueError(f"seed must be an integer in [0, 2**63), got {self.seed!r}")
        if not is_int(self.priority) or not 0 <= self.priority <= MAX_PRIORITY:
            raise ValueError(f"priority must be an integer in [0, {MAX_PRIORITY}], got {self.priority!r}")
        if not is_int(self.n) or self.n < 1:
            raise ValueError(f"n must be a positive integer, got {self.n!r}")
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n must be 1 with a temperature of 0, which draws the same every time, got {self.n}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not all(is_int(token) for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must be integers, got {self.stop_token_ids!r}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_params(params: SamplingParams) -> SamplingParams:
    """The same. TypeError unless they are SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params must be SamplingParams, got {type(params).__name__}")
    return params


def params_of_each(params: SamplingParams | Sequence[SamplingParams], num_prompts: int) -> list[SamplingParams]:
    """One for each of the prompts, from one for all or one for each. They are not looked into."""
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Iterable):
        raise TypeError(f"params must be SamplingParams, or one a prompt, got {type(params).__name__}")
    each = list(params)
    if len(each) != num_prompts:
        raise ValueError(f"params must be one, or one a prompt, got {len(each)} for {num_prompts} prompts")
    return each
