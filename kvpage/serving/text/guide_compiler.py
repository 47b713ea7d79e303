"""GuideCompiler: guides made ready for one tokenizer, and kept for later requests.

Guide ─► a grammar of llguidance ─► a matcher, kept ─► a copy of it for each sequence

The last used ones are kept, and those whose sequences live: samples of one prompt never have it compiled again.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvpage.serving.params.guide import Guide
from kvpage.serving.text.guided_sequence import GuidedSequence, plain_reason

MAX_KEPT = 128
"""Guides that are kept, the last used ones."""
MAX_KEPT_CHARACTERS = 2**20
"""Characters of all their sources: long ones take megabytes when compiled."""

WHITE_SPACE = r"(\x20|\x0D?\x0A[\x20\x09]{0,20})"
"""Between the tokens of JSON: a space, or a new line with its indentation. Small models write blanks without end."""
NUM_WALKS, WALK_TOKENS = 4, 8
"""Tokens of the sequences that a guide is tried with."""


class GuideCompiler:
    """Makes guides into sequences' matchers. Any thread may call it.

    vocab_size: logits of a row. end_ids: the tokens that end a sequence by the model's generation config.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_ids: Iterable[int]) -> None:
        eos_token_id = tokenizer.eos_token_id
        self._tokenizer, self._end_ids = tokenizer, sorted(end_ids, key=lambda token: (token != eos_token_id, token))
        if not self._end_ids and eos_token_id is not None:
            self._end_ids = [eos_token_id]
        self._lock = threading.Lock()  # held for a moment only: a step must not wait for a compilation
        self._num_bits = max(vocab_size, len(tokenizer), *(token + 1 for token in self._end_ids))
        self._known: Any = None  # the tokenizer as llguidance has it, made for the first guide
        self._kept: OrderedDict[Guide, CompiledMatcher] = OrderedDict()
        self._alive: WeakValueDictionary[Guide, CompiledMatcher] = WeakValueDictionary()

    def sequence(self, guide: Guide, ignores_eos: bool) -> GuidedSequence:
        """Return a sequence at the begin of the guide.

        Raises ValueError for a guide that cannot be compiled, with the reason, and for a tokenizer that is none of the
        library `tokenizers`. Raises ModuleNotFoundError without the extra `guided`.
        """
        with self._lock:
            compiled = self._alive.get(guide)
        if compiled is None:
            compiled = CompiledMatcher(self._compiled(guide))
        return self._keep(guide, compiled).sequence(self._num_bits, self._end_ids, ignores_eos)

    def _keep(self, guide: Guide, compiled: "CompiledMatcher") -> "CompiledMatcher":
        """Keep it as the newest one, and forget the oldest ones beyond the bounds, unless their sequences live.

        Return it, or the equal one that another thread has compiled before.
        """
        with self._lock:
            self._kept[guide] = compiled = self._alive.setdefault(guide, compiled)
            self._kept.move_to_end(guide)
            num_characters = sum(len(guide.source) for guide in self._kept)
            while len(self._kept) > MAX_KEPT or (len(self._kept) > 1 and num_characters > MAX_KEPT_CHARACTERS):
                num_characters -= len(self._kept.popitem(last=False)[0].source)
        return compiled

    def _compiled(self, guide: Guide) -> Any:
        library = _library()
        if self._known is None:
            self._known = self._as_known()
        try:
            grammar = _grammar(library, guide)
        except ValueError as error:
            raise ValueError(f"guide must be a valid {guide.kind}: {error}") from error
        matcher = library.LLMatcher(self._known, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"guide must be a valid {guide.kind}: {plain_reason(matcher)}")
        GuidedSequence(matcher, self._num_bits).mask(np.empty(0, np.int32))  # copies then have what it has computed
        if matcher.is_error():
            raise ValueError(f"guide must allow some text, this {guide.kind} allows none: {plain_reason(matcher)}")
        if reason := failure_of(matcher, self._num_bits):
            raise ValueError(f"guide must take less work for a token, this {guide.kind} takes too much: {reason}")
        return matcher

    def _as_known(self) -> Any:
        from llguidance.hf import from_tokenizer

        if not hasattr(self._tokenizer, "backend_tokenizer"):
            name = type(self._tokenizer).__name__
            raise ValueError(f"guide needs a tokenizer of the library tokenizers (a fast one), got {name}")
        tokenizer: Any = self._tokenizer
        try:
            return from_tokenizer(tokenizer, self._num_bits, next(iter(self._end_ids), None))
        except (ValueError, TypeError) as error:
            raise ValueError(f"guide needs a tokenizer that llguidance reads: {error}") from error


class CompiledMatcher:
    """A compiled guide, of which each sequence has a copy. A sequence holds it. matcher: of llguidance."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def sequence(self, num_bits: int, end_ids: Sequence[int], ignores_eos: bool) -> GuidedSequence:
        """Return a sequence at the begin of the guide; see GuidedSequence."""
        return GuidedSequence(self._matcher.deep_copy(), num_bits, end_ids, ignores_eos, self)


def failure_of(matcher: Any, num_bits: int) -> str | None:
    """Return why copies of a matcher fail within the first tokens; None if they do not.

    Large repeats, and many long choices, are compiled and then fail at a token: better here than in a step of all.
    """
    for walk in range(NUM_WALKS):
        sequence, token_ids = GuidedSequence(matcher.deep_copy(), num_bits), np.empty(0, np.int32)
        for _ in range(WALK_TOKENS):
            bits = np.unpackbits(sequence.mask(token_ids).view(np.uint8), bitorder="little")
            if sequence.error is not None:
                return sequence.error
            if sequence.is_over(token_ids) or not (allowed := np.flatnonzero(bits)).size:
                break
            token_ids = np.append(token_ids, allowed[len(allowed) * walk // NUM_WALKS]).astype(np.int32)
    return None


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("guide needs the extra 'guided': pip install 'kvpage[guided]'") from error
    return llguidance


def _grammar(library: Any, guide: Guide) -> str:
    if guide.kind == "json_schema":
        options = {"whitespace_flexible": False} if guide.compact else {"whitespace_pattern": WHITE_SPACE}
        grammar: str = library.LLMatcher.grammar_from_json_schema(guide.source, overrides=options)
    elif guide.kind == "regex":
        grammar = library.LLMatcher.grammar_from_regex(guide.source)
    elif guide.kind == "choice":
        grammar = library.LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, json.loads(guide.source)))}")
    else:
        grammar = library.grammar_from("grammar", guide.source)
    return grammar
