"""LibraryProcessors: the rarer rules of a generation config, by transformers' own processors, one row at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpage.serving.params.logits import LogitsParams

RULES = (
    "sequence_bias", "no_repeat_ngram_size", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id",
    "exponential_decay_length_penalty", "remove_invalid_values", "watermarking_config",
)  # fmt: skip
WARPERS = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def asks_library(params: LogitsParams) -> bool:
    """Whether any rule of transformers' own processors applies."""
    return bool(asked_rules(params))


def asked_rules(params: LogitsParams) -> list[str]:
    """Return the names of the rules of transformers' own processors that apply."""
    rules = [name for name in RULES if getattr(params, name) not in (None, (), False, 0) or _is_token(params, name)]
    return rules + asked_warpers(params)


def _is_token(params: LogitsParams, name: str) -> bool:
    return name == "forced_bos_token_id" and params.forced_bos_token_id is not None


def asked_warpers(params: LogitsParams) -> list[str]:
    """Return the names of the warpers that apply. Without a temperature none does: no token is drawn."""
    if not getattr(params, "temperature", None):
        return []
    return [name for name in WARPERS if getattr(params, name) not in (None, 0.0) and getattr(params, name) < 1]


class LibraryProcessors:
    """The processors of one sequence, in the order in which transformers applies them.

    before: those before kvpage's penalties. after: those between the penalties and suppress_tokens.
    drawing: those after the temperature.
    """

    def __init__(
        self, params: LogitsParams, stop_ids: npt.NDArray[np.int64], num_prompt_tokens: int, max_tokens: int
    ) -> None:
        self._params: Any = params  # SamplingParams where tokens are drawn
        self._num_prompt_tokens = num_prompt_tokens
        self._eos = torch.from_numpy(stop_ids)
        self._max_length = num_prompt_tokens + max_tokens
        self.before: Sequence[Any] = self._before()
        self.after: Sequence[Any] = [*self._words(), *self._ends()]
        self.drawing: Sequence[Any] = self._drawing()
        self._mark: Any = None

    @property
    def takes_over_drawing(self) -> bool:
        """Whether transformers does all of the warping: its warpers come between top_k, top_p and min_p."""
        return bool(self.drawing)

    def mark(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores with the watermark. token_ids: int64 [1, num_tokens]; scores: [1, vocab_size]."""
        config = self._params.watermarking_config
        if config is None:
            return scores
        if self._mark is None:
            self._mark = config.construct_processor(scores.shape[-1], scores.device)
        marked: torch.Tensor = self._mark(token_ids, scores)
        return marked

    def _before(self) -> list[Any]:
        from transformers import SequenceBiasLogitsProcessor

        biases = self._params.sequence_bias
        return [SequenceBiasLogitsProcessor([[list(word), bias] for word, bias in biases])] if biases else []

    def _words(self) -> list[Any]:
        from transformers import NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

        params = self._params
        processors: list[Any] = []
        if params.no_repeat_ngram_size:
            processors.append(NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
        ends = [[int(token)] for token in self._eos]
        if bad := [list(word) for word in params.bad_words_ids or () if list(word) not in ends]:
            processors.append(NoBadWordsLogitsProcessor(bad))
        return processors

    def _ends(self) -> list[Any]:
        import transformers as library

        params = self._params
        processors: list[Any] = []
        if params.forced_bos_token_id is not None:
            processors.append(library.ForcedBOSTokenLogitsProcessor(params.forced_bos_token_id))
        if params.forced_eos_token_id:
            processors.append(library.ForcedEOSTokenLogitsProcessor(self._max_length, list(params.forced_eos_token_id)))
        if params.remove_invalid_values:
            processors.append(library.InfNanRemoveLogitsProcessor())
        if params.exponential_decay_length_penalty:
            processors.append(self._decay)
        return processors

    def _decay(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        from transformers import ExponentialDecayLengthPenalty

        ends = self._eos[(self._eos >= 0) & (self._eos < scores.shape[1])]
        decay, start = self._params.exponential_decay_length_penalty, self._num_prompt_tokens
        penalized: torch.Tensor = ExponentialDecayLengthPenalty(decay, ends, start)(token_ids, scores)
        return penalized

    def _drawing(self) -> list[Any]:
        import transformers as library

        params, asked = self._params, asked_warpers(self._params)
        if not asked:
            return []
        warpers = [_warper("TopHLogitsWarper", params.top_h)] if "top_h" in asked else []
        if params.top_k:
            warpers.append(library.TopKLogitsWarper(params.top_k))
        if params.top_p is not None and params.top_p < 1:
            warpers.append(library.TopPLogitsWarper(params.top_p))
        if params.min_p:
            warpers.append(_warper("MinPLogitsWarper", params.min_p))
        names = {"typical_p": "TypicalLogitsWarper", "epsilon_cutoff": "EpsilonLogitsWarper"}
        names["eta_cutoff"] = "EtaLogitsWarper"
        return warpers + [_warper(kind, getattr(params, name)) for name, kind in names.items() if name in asked]


def _warper(kind: str, value: float) -> Any:
    import transformers.generation.logits_process as library

    if not hasattr(library, kind):
        raise ValueError(f"transformers must have {kind} for these parameters, this version lacks it")
    return getattr(library, kind)(value)
