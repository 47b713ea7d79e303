"""Intake: prompts as callers give them, checked and made into requests.

tokens, params, segments ─► Prompt ─► check_tokens, check_length, the model's defaults ─► Request
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpage._C import ids_below
from kvpage.blend.config import BlendConfig
from kvpage.blend.spans import spans_of_lengths
from kvpage.blocks.groups.states.marks import as_cache_at
from kvpage.blocks.manager import BlockManager
from kvpage.checks.fields import is_int
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import as_integer, as_list, check_flag
from kvpage.serving.blending.blended_prompt import BlendedPrompt
from kvpage.serving.loop.outputs import StepOutput
from kvpage.serving.loop.request import Request
from kvpage.serving.model.limits import eos_token_ids, rope_limit, vocab_size
from kvpage.serving.params.defaults import ParamDefaults
from kvpage.serving.params.sampling import SamplingParams, check_params
from kvpage.serving.sampling.library_processors import asked_rules
from kvpage.serving.text.text_rules import TextRules
from kvpage.serving.text.token_logprobs import ScoredPrompt
from kvpage.serving.weights.engine_weights import EngineWeights

MAX_SCORED_LOGITS = 2**26
"""Logits of prompts that one step may have at most: 256 MiB in fp32."""


class Prompt(NamedTuple):
    """The arguments of a request.

    tokens to segments, priority, cache_at: see Engine.add_request. sink: where its outputs go; None for those that
    `step` returns. copy_at: where its one segment is repeated, see Engine.warm_segments. is_warming: that call has made
    it.
    """

    tokens: Tokens
    params: SamplingParams | None
    request_id: str | None = None
    namespace: bytes = b""
    blend: bool = False
    segments: Sequence[int] | None = None
    sink: deque[StepOutput] | None = None
    copy_at: int | None = None
    is_warming: bool = False
    priority: int = 0
    cache_at: Sequence[int] = ()


class Intake:
    """Checks prompts for one model, whose K and V go to the blocks of `manager`.

    defaults: for parameters that are left at None. max_model_len: tokens of a request, generated ones included.
    tokenizer: for parameters that speak of text; None refuses these.
    blend_config: returns how the engine blends now; None if it does not, which refuses segments.
    same_bits: refuses rules that torch applies, see `Sampler`.
    weights: know the adapters, and the namespaces of what they compute; None for a model that has none.
    Any thread may ask it at any time: it reads what does not change, and replaces what it remembers as a whole.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        manager: BlockManager,
        defaults: ParamDefaults,
        max_model_len: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        blend_config: Callable[[], BlendConfig | None] = lambda: None,
        same_bits: bool = False,
        weights: EngineWeights | None = None,
    ) -> None:
        self._weights = EngineWeights() if weights is None else weights
        self.defaults, self.max_model_len, self.tokenizer = defaults, max_model_len, tokenizer
        self.vocab_size = vocab_size(model)
        self.eos_token_ids = eos_token_ids(model)
        self._text_rules = TextRules(tokenizer, self.vocab_size, self.eos_token_ids)
        self._model, self._blend_config, self._same_bits = model, blend_config, same_bits
        self._num_slots = manager.num_blocks * manager.block_size
        self._filled: tuple[SamplingParams, SamplingParams] | None = None  # the last ones given, and with defaults

    def check_tokens(self, tokens: Tokens) -> npt.NDArray[np.int32]:
        """Return the tokens as int32. ValueError for none, and for ids out of the vocabulary; TypeError for text."""
        read = ids_below(tokens, self.vocab_size)  # what callers mostly give, in one call
        if read is not None and len(read):
            return read
        array = as_tokens(tokens)
        if len(array) == 0:
            raise ValueError("tokens must hold at least one token, got none")
        if array.min() < 0 or array.max() >= self.vocab_size:
            raise ValueError(
                f"tokens must be ids in [0, {self.vocab_size}), got {int(array.min())} to {int(array.max())}"
            )
        return array

    def check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """ValueError if the model does not take num_prompt_tokens + max_tokens tokens."""
        num_prompt_tokens = as_integer("num_prompt_tokens", num_prompt_tokens)
        max_tokens = as_integer("max_tokens", max_tokens)
        if num_prompt_tokens + max_tokens > self.max_model_len:
            why = rope_limit(self._model, num_prompt_tokens + max_tokens)
            raise ValueError(
                f"prompt and max_tokens must fit into max_model_len={self.max_model_len}, "
                f"got {num_prompt_tokens} + {max_tokens}{why}"
            )

    def request(self, prompt: Prompt, request_id: str) -> Request:
        """Make a request, once all of the prompt is checked. request_id: the prompt's own, or a new one."""
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {type(request_id).__name__}")
        if not isinstance(prompt.priority, int) or isinstance(prompt.priority, bool):
            raise TypeError(f"priority must be an integer, got {type(prompt.priority).__name__}")
        tokens = self.check_tokens(prompt.tokens)
        params = self._params(prompt.params, len(tokens))
        self._weights.entry(prompt.namespace, params.adapter)  # raises for a wrong one
        is_plain = prompt.blend is False and prompt.segments is None
        has_marks = not isinstance(prompt.cache_at, tuple) or len(prompt.cache_at) > 0
        request = Request(
            request_id,
            tokens,
            params,
            arrival=0,
            eos_token_ids=self.eos_token_ids,
            namespace=prompt.namespace,
            sink=prompt.sink,
            blending=None if is_plain else self._blending(prompt, request_id, tokens, params),
            priority=prompt.priority,
            answer_rules=self._text_rules,
            cache_at=as_cache_at(prompt.cache_at, len(tokens)) if has_marks else (),
        )
        if params.prompt_logprobs is not None:
            max_rows = max(MAX_SCORED_LOGITS // self.vocab_size, 1)
            request.scored = ScoredPrompt(len(tokens), params.prompt_logprobs, max_rows)
        return request

    def warming(self, tokens: Tokens, namespace: bytes, config: BlendConfig) -> Prompt:
        """Return a prompt that computes and keeps a segment; see Engine.warm_segments."""
        array, params = self.check_tokens(tokens), SamplingParams(max_tokens=1)
        lengths, num_twice = [len(array)], 2 * len(array)
        takes_two = num_twice < self.max_model_len and num_twice <= self._num_slots
        if not config.uses_sensitivity or not takes_two:
            return Prompt(array, params, namespace=namespace, segments=lengths, is_warming=True)
        twice = np.concatenate([array, array])
        return Prompt(twice, params, namespace=namespace, segments=lengths, copy_at=len(array), is_warming=True)

    def _blending(
        self, prompt: Prompt, request_id: str, tokens: npt.NDArray[np.int32], params: SamplingParams
    ) -> BlendedPrompt | None:
        """Return blending's part of the request; None for a prompt without segments."""
        check_flag("blend", prompt.blend)
        if prompt.blend and params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs must be None with blend, which does not compute all of the prompt")
        config = self._blend_config()
        if config is None:
            raise ValueError("blend and segments need an engine with a BlendConfig")
        spans = config.spans(tokens) if prompt.segments is None else spans_of_lengths(prompt.segments, len(tokens))
        rules = prompt.blend, prompt.copy_at, prompt.is_warming
        return BlendedPrompt(request_id, tokens, prompt.namespace, spans, *rules) if spans else None

    def _params(self, params: SamplingParams | None, num_prompt_tokens: int) -> SamplingParams:
        """Return parameters with nothing left at its default, which the model and the blocks take.

        Those that many requests share, one after the other, are filled in once, and found again by their values.
        """
        last = self._filled
        if last is not None and isinstance(params, SamplingParams) and params == last[0]:
            if num_prompt_tokens + (last[1].max_tokens or 0) > self.max_model_len:
                self.check_length(num_prompt_tokens, last[1].max_tokens or 0)
            return last[1]
        if params is not None:
            self._text_rules.check(check_params(params))
        longest = min(self.max_model_len, self._num_slots + 1)  # the last token is never fed back
        filled = self.defaults.sampling(params, num_prompt_tokens, longest)
        self.check_length(num_prompt_tokens, filled.max_tokens or 0)
        filled.check_vocabulary(self.vocab_size)
        if self._same_bits and (rules := asked_rules(filled)):
            raise ValueError(f"{', '.join(rules)} must be None with same_bits: torch applies it to all rows of a step")
        if params is not None and params.max_tokens is not None:  # else the prompt's length says how many
            self._filled = params, filled
        return filled


def as_prompts(prompts: Sequence[Tokens]) -> list[Tokens]:
    """Return the prompts of a call as a list. TypeError for one text, and for the token ids of one prompt."""
    if isinstance(prompts, str | bytes):
        raise TypeError("prompts must be several, each of token ids, got one text: give [tokenizer(text)['input_ids']]")
    listed = as_list("prompts", prompts)
    if listed and is_int(listed[0]):
        raise TypeError("prompts must be several, each of token ids, got the ids of one: put them into a list")
    return listed
