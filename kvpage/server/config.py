"""ServerConfig: the names, keys and limits of a server."""

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvpage.checks.values import as_integer, as_list, check_at_least, check_flag

LIMITS = {
    "max_body_bytes": 1, "max_open_requests": 1, "max_n": 1, "max_prompts": 1, "max_stop_strings": 0,
    "max_stop_characters": 1, "max_logprobs": 0, "max_batch_tokens": 1, "max_scored_tokens": 1,
    "max_cut_characters": 1, "num_tokenizer_threads": 1, "max_kept_responses": 0, "max_kept_bytes": 0,
}  # fmt: skip
FLAGS = ("return_tokens_as_ids", "strict_fields", "open_metrics", "access_log")
MAX_LOGPROBS = 20  # of an engine
MAX_HINTED_PRIORITY = 100  # of a hint to retain a prompt


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that clients send as `Authorization: Bearer KEY`.

    Attributes:
        key: The secret, at least one character, ASCII without spaces. It is in no repr.
        tenant: The name of its owner, whose requests share cached blocks with no other tenant's. None lets a request
            name its tenant by the header `X-Tenant-Id`: for a gateway that is trusted.

    Raises:
        ValueError: The key or the tenant is empty, or a key holds other characters.
        TypeError: One is of another type.
    """

    key: str = field(repr=False)
    tenant: str | None = ""

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not isinstance(self.tenant, str | None):
            raise TypeError("key must be a str, and tenant a str or None")
        if not self.key or not self.key.isascii() or not self.key.isprintable() or " " in self.key:
            raise ValueError("key must be printable ASCII without spaces, and not empty")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The names, keys and limits of a server, frozen and validated.

    Attributes:
        served_model_names: The names by which requests may ask for the model. The first one is in the answers.
        adapter_names: Adapters of the engine, each asked for by its name as that of a model.
        api_keys: Who may ask. None at all lets everybody who reaches the port ask.
        allowed_hosts: Names in the URL that the server answers to, such as "localhost"; any other is refused. It keeps
            web pages that rename their host out of a server on this machine. IP addresses and probes of health are
            always answered. None at all allows every name.
        chat_template: A Jinja template in place of the tokenizer's own. None takes that.
        max_body_bytes: Bytes of a request's body at most; beyond it 413.
        max_body_seconds: Seconds in which all of a body must come; beyond it 408.
        max_open_requests: HTTP requests with a body at once, from the first byte of the body to the end of the answer;
            beyond it 503.
        max_open_bytes: Bytes of the bodies of all of them at most; beyond it 503. None means 16 of the longest.
        max_prompt_tokens: Tokens of a prompt at most. None means all that the engine takes.
        max_batch_tokens: Tokens of all prompts of a request at most, but for one prompt alone. A prompt that is in the
            answer counts once for each sample.
        max_scored_tokens: Log-probabilities of prompts in an answer at most: for each token one, and one for each of
            the likeliest beside it.
        max_cut_characters: Characters of a text of which `truncate_prompt_tokens` takes the end, at most; texts that
            may fit as they are may be longer.
        max_pin_seconds: Seconds for which a hint may pin a prompt at most. The engine's `pin_quota` limits the blocks.
        tenant_pin_quota: Blocks that the pins of one tenant hold at most. None means all of the engine's `pin_quota`.
        max_retain_priority: Priority of a prompt's blocks, 0 to 100, that a hint may ask for at most; more counts as so
            much.
        min_priority: The least `priority` that a request may name: lower ones run first. It is at most 0, since a
            request without one has 0. None allows all.
        send_timeout: Seconds after which a client that reads nothing of its stream has gone. None means never.
        max_n: Samples of a prompt at most.
        max_prompts: Prompts of a batch at most.
        max_stop_strings: Stop strings of a request at most.
        max_stop_characters: Characters of one of them at most.
        max_logprobs: Likeliest tokens beside each chosen one at most, at most 20.
        max_kept_responses: Answers of `/v1/responses` that are kept in memory at most, for requests that name them by
            `previous_response_id`. Where room lacks, the tenant that has most forgets its oldest.
        max_kept_bytes: Bytes of all of them at most.
        num_tokenizer_threads: Threads that tokenize and render chats.
        return_tokens_as_ids: Show tokens in `logprobs` as "token_id:17", unless a request says otherwise.
        strict_fields: Refuse fields of a body that are not served; else they are left aside, counted, and named by the
            header X-Ignored-Fields.
        open_metrics: Whether `/metrics` needs no key.
        access_log: Whether each request is a line in the log.
        weights_folder: Whose folders are versions of the model's weights, which operators may ask for. None for none.
        operator_key: The header `X-Operator-Key` of such requests; needed with a `weights_folder`. It is in no repr.

    Raises:
        ValueError: A value is out of its range.
        TypeError: A value is of another type.
    """

    served_model_names: Sequence[str] = ("model",)
    api_keys: Sequence[ApiKey] = ()
    allowed_hosts: Sequence[str] = ()
    chat_template: str | None = None
    max_body_bytes: int = 16 * 2**20
    max_body_seconds: float = 120.0
    max_open_requests: int = 2048
    max_open_bytes: int | None = None
    max_prompt_tokens: int | None = None
    max_batch_tokens: int = 2**21
    max_scored_tokens: int = 2**20
    max_cut_characters: int = 2**20
    max_pin_seconds: float = 3600.0
    tenant_pin_quota: int | None = None
    max_retain_priority: int = MAX_HINTED_PRIORITY
    min_priority: int | None = None
    send_timeout: float | None = 60.0
    max_n: int = 128
    max_prompts: int = 256
    max_stop_strings: int = 16
    max_stop_characters: int = 1024
    max_logprobs: int = MAX_LOGPROBS
    max_kept_responses: int = 1024
    max_kept_bytes: int = 64 * 2**20
    num_tokenizer_threads: int = 2
    return_tokens_as_ids: bool = False
    strict_fields: bool = False
    open_metrics: bool = True
    access_log: bool = False
    adapter_names: Sequence[str] = ()
    weights_folder: Path | None = None
    operator_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for name, least in LIMITS.items():
            check_at_least(name, getattr(self, name), least)
        if self.max_prompt_tokens is not None:
            check_at_least("max_prompt_tokens", self.max_prompt_tokens, 1)
        if self.max_open_bytes is not None:
            check_at_least("max_open_bytes", self.max_open_bytes, self.max_body_bytes)
        if self.max_logprobs > MAX_LOGPROBS:
            raise ValueError(f"max_logprobs must be at most {MAX_LOGPROBS}, got {self.max_logprobs}")
        for name in ("max_pin_seconds", "max_body_seconds"):
            _check_seconds(name, getattr(self, name))
        if self.send_timeout is not None:
            _check_seconds("send_timeout", self.send_timeout)
        self._check_hints()
        if not isinstance(self.chat_template, str | None):
            raise TypeError(f"chat_template must be a str or None, got {type(self.chat_template).__name__}")
        for name in FLAGS:
            check_flag(name, getattr(self, name))
        self._check_names("served_model_names")
        self._check_names("allowed_hosts")
        self._check_names("adapter_names")
        if both := sorted({*self.served_model_names} & {*self.adapter_names}):
            raise ValueError(f"adapter_names must differ from served_model_names, {both[0]!r} is one")
        if self.weights_folder is not None and not self.operator_key:
            raise ValueError("operator_key must not be empty with a weights_folder")
        if not self.served_model_names:
            raise ValueError("served_model_names must hold at least one name, got none")
        self._check_keys()

    def _check_hints(self) -> None:
        if self.tenant_pin_quota is not None:
            check_at_least("tenant_pin_quota", self.tenant_pin_quota, 0)
        if self.min_priority is not None:
            as_integer("min_priority", self.min_priority)
            if self.min_priority > 0:
                raise ValueError(f"min_priority must be at most 0, got {self.min_priority}")
        check_at_least("max_retain_priority", self.max_retain_priority, 0)
        if self.max_retain_priority > MAX_HINTED_PRIORITY:
            raise ValueError(
                f"max_retain_priority must be at most {MAX_HINTED_PRIORITY}, got {self.max_retain_priority}"
            )

    def _check_names(self, field_name: str) -> None:
        values = getattr(self, field_name)
        if isinstance(values, str):
            raise TypeError(f"{field_name} must be several, got one str: put it into a list")
        names = tuple(as_list(field_name, values))
        if not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"{field_name} must be names, got {names!r}")
        object.__setattr__(self, field_name, names)

    def _check_keys(self) -> None:
        keys = tuple(as_list("api_keys", self.api_keys))
        if not all(isinstance(key, ApiKey) for key in keys):
            raise TypeError("api_keys must be ApiKey objects")
        if len({key.key for key in keys}) < len(keys):
            raise ValueError("api_keys must differ, one is there twice")
        object.__setattr__(self, "api_keys", keys)


def _check_seconds(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value!r}")
