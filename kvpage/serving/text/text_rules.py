"""TextRules: all that an engine does with the text of answers, by the tokenizer that it was given."""

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from kvpage.serving.params.sampling import SamplingParams
from kvpage.serving.text.answer import Answer
from kvpage.serving.text.detokenizer import Detokenizer, id_limit
from kvpage.serving.text.guide_compiler import GuideCompiler
from kvpage.serving.text.guided_sequence import GuidedSequence
from kvpage.serving.text.stop_search import StopSearch


class TextRules:
    """The rules of text of one engine. tokenizer: None refuses all of them, and gives no text.

    vocab_size: of the model. end_ids: the tokens that end a sequence by its generation config.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, end_ids: Iterable[int]) -> None:
        self.tokenizer, self._limit = tokenizer, 0 if tokenizer is None else id_limit(tokenizer)
        self._detokenizer: Detokenizer | None = None
        self._guides = None if tokenizer is None else GuideCompiler(tokenizer, vocab_size, end_ids)

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError for rules of text without a tokenizer."""
        if self.tokenizer is not None or not (params.stop or params.guide is not None):
            return
        for name, is_given in (("stop", bool(params.stop)), ("guide", params.guide is not None)):
            if is_given:
                raise ValueError(f"{name} needs the tokenizer: give Engine.from_model(..., tokenizer=...)")

    def answer(self, params: SamplingParams, num_prompt_tokens: int) -> Answer | None:
        """Return a new one; None if the parameters ask for nothing of it. Raises as GuideCompiler does."""
        if not params.stop and params.guide is None and params.logprobs is None:
            return None
        search, guided = self._stop_search(params, num_prompt_tokens), self._guided(params)
        return Answer(search, guided, None if params.logprobs is None else [])

    def _stop_search(self, params: SamplingParams, num_prompt_tokens: int) -> StopSearch | None:
        if not params.stop or self.tokenizer is None:
            return None
        min_tokens = max(params.min_tokens or 0, (params.min_length or 0) - num_prompt_tokens)
        if self._detokenizer is None:  # one for all requests and samples: special tokens take a while to be found
            self._detokenizer = Detokenizer(self.tokenizer)
        keeps_stop = params.include_stop_str_in_output
        return StopSearch(self.tokenizer, params.stop, min_tokens, keeps_stop, self._detokenizer)

    def _guided(self, params: SamplingParams) -> GuidedSequence | None:
        if params.guide is None or self._guides is None:
            return None
        return self._guides.sequence(params.guide, params.ignore_eos)

    def text(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of generated tokens without special ones; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        text = self.tokenizer.decode([token for token in token_ids if token < self._limit], skip_special_tokens=True)
        assert isinstance(text, str), "one list of tokens has one text"
        return text
