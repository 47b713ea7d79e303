"""SamplingFields: the fields that completions and chats share, with OpenAI's names and vLLM's beside them.

Ranges that SamplingParams checks are left to it. Its messages begin with the name of the field.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from kvpage.server.protocol.errors import bad_request
from kvpage.server.protocol.kv_hints import KvHints
from kvpage.server.protocol.request_model import Integer, RequestModel

MAX_INT = 2**31 - 1
FORM_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
MAX_BIASES, MAX_STOP_TOKENS, MAX_CHOICES, MAX_POSITIONS = 1024, 1024, 4096, 64
Count = Annotated[Integer, Field(ge=0, le=MAX_INT)]
Positive = Annotated[Integer, Field(ge=1, le=MAX_INT)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Factor = Annotated[float, Field(ge=0.01, le=100)]
"""A logit times it is a finite number."""
Bias = Annotated[float, Field(ge=-100, le=100)]
Salt = Annotated[str, Field(min_length=1, max_length=1024)]
MAX_SESSION_NAME = 256
SessionName = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_NAME)]
MaxTokens = Annotated[Integer, Field(ge=-1, lt=2**63)]
NO_LIMIT = -1
"""As max_tokens: all that the model takes."""


def _few_biases(value: object) -> object:
    """Refuse too many before each is looked at."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"logit_bias must have at most {MAX_BIASES} tokens, got {len(value)}")
    return value


class StreamOptions(RequestModel):
    """The options of a stream, beside its tokens."""

    called: ClassVar[str] = "stream_options."
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class JsonSchema(RequestModel):
    """The schema of a response format."""

    called: ClassVar[str] = "response_format.json_schema."
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")] = True
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """The form that an answer must have."""

    called: ClassVar[str] = "response_format."
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(RequestModel):
    """The form that an answer must have, as vLLM names it. One of the forms is given.

    disable_any_whitespace: no white space outside of strings of JSON.
    """

    called: ClassVar[str] = "structured_outputs."
    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False


class SamplingFields(RequestModel):
    """The common fields of completions and chats."""

    logprobs_field: ClassVar[str] = "logprobs"
    """The field that says how many likeliest tokens are shown."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Positive = 1
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[Integer, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: float | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Factor | None = None
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(_few_biases)] | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: Count | None = None
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[Count], Field(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Positive | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_CHOICES)] | None = None
    guided_grammar: str | None = None
    cache_salt: Salt | None = None
    kv_hints: KvHints | None = None
    session_id: SessionName | None = None
    session_branch: SessionName | None = None
    cache_at: Annotated[list[Positive], Field(max_length=MAX_POSITIONS)] | None = None
    priority: Annotated[Integer, Field(ge=-MAX_INT, le=MAX_INT)] = 0
    timeout: Annotated[float, Field(gt=0)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_is_text(cls, value: object) -> object:
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not is_list and not isinstance(value, str):
            raise ValueError("stop must be a string or a list of strings")
        return value

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are shown beside each; None for no log-probabilities at all."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same of the prompt's tokens."""
        return None

    @property
    def num_prompts(self) -> int:
        """The prompts of the batch."""
        return 1

    @property
    def shows_prompt(self) -> bool:
        """Whether each sample of the answer shows its prompt."""
        return self.return_token_ids

    def most_tokens(self, num_left: int) -> int:
        """Return how many tokens are generated at most. num_left: tokens that the model takes after the prompt."""
        return within(self.max_tokens, num_left)

    @property
    def form_field(self) -> str | None:
        """The field that names the form of the answer; None for any form. ApiError 400 for two of them."""
        names = [name for name in FORM_FIELDS if getattr(self, name) is not None]
        if len(names) > 1:
            raise bad_request(f"{names[1]} must not be given beside {names[0]}", param=names[1])
        return names[0] if names else None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


def within(max_tokens: int | None, num_left: int) -> int:
    """Return a limit of tokens, cut to the tokens that are left: clients ask for more than a model takes."""
    return num_left if max_tokens is None or max_tokens == NO_LIMIT else min(max_tokens, num_left)
