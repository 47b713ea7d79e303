"""LogitsParams: the rules that change a sequence's logits before a token is chosen, by sampling or by beams."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from kvpage.checks import fields as checks

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
    """The rules that change logits, frozen and validated. Names and meanings are those of GenerationConfig.

    min_tokens, the two penalties of presence and frequency, and logit_bias are kvpage's own names. None takes the
    default of the model's generation config. Without one, the rule does not apply.

    Args:
        min_tokens: the number of generated tokens before one may end the request (min_new_tokens).
        presence_penalty: subtracted from the logits of generated tokens.
        frequency_penalty: subtracted from the logits of generated tokens, once for each time.
        logit_bias: added to the logits of single tokens: {token: bias}, or pairs. It is kept as pairs.
        max_length: the most tokens of prompt and answer together. It applies where max_tokens is None.
        min_length: the number of tokens of prompt and answer together before one may end the request.
        repetition_penalty: above 1, tokens of the prompt and the answer become less likely.
        sequence_bias: added to the logit of a token that would complete such a sequence: {tokens: bias}, or pairs.
        no_repeat_ngram_size: no run of that many tokens comes twice. 0 allows all.
        bad_words_ids: sequences that are not generated.
        suppress_tokens: tokens that are not generated.
        begin_suppress_tokens: tokens that are not generated first.
        forced_bos_token_id: the first token after a prompt of one token.
        forced_eos_token_id: one token or several, as the last of max_tokens.
        exponential_decay_length_penalty: (start, factor). The end becomes likelier with each token after `start`.
        remove_invalid_values: NaN becomes 0 and an infinity the largest number, in place of an error.
        renormalize_logits: normalize the scores of beams again. Draws do not change.
        watermarking_config: transformers' WatermarkingConfig.

    Raises:
        ValueError: for a value that a field does not take, with the field's name.
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
        """Raise ValueError for tokens outside of the model's vocabulary, in fields that need the model's own.

        Args:
            vocab_size: the number of ids in the vocabulary.

        Raises:
            ValueError: with the field's name and the token.
        """
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
        """Whether a rule applies to the logits."""
        values = _values_of(self)
        return values != _UNSET and any(
            value not in neutral for value, neutral in zip(values, RULES.values(), strict=True)
        )


NEUTRAL: dict[str, object] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
NEUTRAL |= {"min_tokens": 0, "min_length": 0, "no_repeat_ngram_size": 0, "remove_invalid_values": False}
NOT_OF_LOGITS = ("max_length", "renormalize_logits")
RULES = {
    rule.name: (None, NEUTRAL.get(rule.name), ()) for rule in fields(LogitsParams) if rule.name not in NOT_OF_LOGITS
}
"""The rules, each with the values that change nothing."""
_values_of = attrgetter(*RULES)
_UNSET = (None,) * len(RULES)
