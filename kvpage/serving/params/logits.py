"""LogitsParams: what is done to a sequence's logits before a token is chosen, whichever way it is chosen."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvpage.serving.params import field_checks as checks

LOGITS_CHECKS: dict[str, checks.Check] = {
    "max_length": checks.POSITIVE,
    "min_tokens": checks.COUNT,
    "min_length": checks.COUNT,
    "repetition_penalty": checks.real("positive and finite", lambda value: 0 < value < float("inf")),
    "presence_penalty": checks.FINITE,
    "frequency_penalty": checks.FINITE,
    "logit_bias": checks.token_biases,
    "sequence_bias": checks.word_biases,
    "no_repeat_ngram_size": checks.COUNT,
    "bad_words_ids": checks.words,
    "suppress_tokens": checks.token_ids,
    "begin_suppress_tokens": checks.token_ids,
    "forced_bos_token_id": checks.token_id,
    "forced_eos_token_id": checks.one_or_more_ids,
    "exponential_decay_length_penalty": checks.length_decay,
    "remove_invalid_values": checks.flag,
    "renormalize_logits": checks.flag,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsParams:
    """Frozen and validated. None takes the default of the model's generation config, or does nothing without one.

    The names and meanings are those of transformers' GenerationConfig, but for the first four.

    min_tokens: how many tokens are generated before one that ends the request may come (min_new_tokens).
    presence_penalty, frequency_penalty: taken off the logit of a token that was generated, and for each time it was.
    logit_bias: added to the logits of single tokens: {token: bias}, or pairs; kept as pairs.
    max_length: of prompt and generated tokens together, where max_tokens is None.
    min_length: of prompt and generated tokens together, before a token that ends the request may come.
    repetition_penalty: above 1, tokens of the prompt and generated ones become less likely.
    sequence_bias: added where the last token of such a sequence would complete it: {tokens: bias}, or pairs.
    no_repeat_ngram_size: no run of so many tokens comes twice; 0 for any.
    bad_words_ids: sequences that are not generated.
    suppress_tokens, begin_suppress_tokens: not generated at all, or not as the first token.
    forced_bos_token_id: follows a prompt of one token. forced_eos_token_id: one or several; the last of max_tokens.
    exponential_decay_length_penalty: (start, factor): the end becomes likelier with each token after `start`.
    remove_invalid_values: NaN becomes 0 and an infinity the largest number, instead of an error.
    renormalize_logits: the scores of beams are normalized again; no difference to what is drawn.
    watermarking_config: transformers' WatermarkingConfig.
    """

    max_length: int | None = None
    min_tokens: int | None = None
    min_length: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Any = None
    sequence_bias: Any = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: Any = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    remove_invalid_values: bool | None = None
    renormalize_logits: bool | None = None
    watermarking_config: Any = None

    def __post_init__(self) -> None:
        checks.check_fields(self, LOGITS_CHECKS)
        mark = self.watermarking_config
        if mark is not None and not callable(getattr(mark, "construct_processor", None)):
            raise ValueError(f"watermarking_config must be a WatermarkingConfig, got {type(mark).__name__}")

    def check_vocabulary(self, vocab_size: int) -> None:
        """ValueError for tokens that the model does not have, where one is asked for."""
        named = {
            "logit_bias": [token for token, _ in self.logit_bias or ()],
            "sequence_bias": [token for word, _ in self.sequence_bias or () for token in word],
            "bad_words_ids": [token for word in self.bad_words_ids or () for token in word],
            "forced_bos_token_id": [] if self.forced_bos_token_id is None else [self.forced_bos_token_id],
            "forced_eos_token_id": self.forced_eos_token_id or (),
        }
        for name, tokens in named.items():
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise ValueError(f"{name} must be ids in [0, {vocab_size}), got {token}")

    @property
    def changes_logits(self) -> bool:
        """Whether anything but the way of choosing is asked for."""
        return any(
            value not in (None, NEUTRAL.get(one.name), ())
            for one in fields(LogitsParams)
            if one.name not in NOT_OF_LOGITS
            for value in [getattr(self, one.name)]
        )


NEUTRAL: dict[str, object] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
NEUTRAL |= {"min_tokens": 0, "min_length": 0, "no_repeat_ngram_size": 0, "remove_invalid_values": False}
NOT_OF_LOGITS = ("max_length", "renormalize_logits")
