"""SampledRow: the rules for one sequence's logits as arrays, so that many sequences are processed in one call.

params    repetition_penalty=1.2        min_tokens=4                suppress_tokens=[7]
                    |                        |                            |
arrays     ids seen, times generated    stop ids, up to a length    ids
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

import kvpage._C as _C
from kvpage.layout.sampling_record import SamplingRecord
from kvpage.serving.params.logits import LogitsParams
from kvpage.serving.params.sampling import SamplingParams
from kvpage.serving.sampling.library_processors import LibraryProcessors, asks_library
from kvpage.serving.sampling.native_rows import GREEDY, packed
from kvpage.serving.sampling.token_tables import NamedTokens, TokenTables
from kvpage.serving.sampling.warping import LEAST_TEMPERATURE, MOST_TEMPERATURE
from kvpage.serving.text.guided_sequence import GuidedSequence, Mask

TokenArray = npt.NDArray[np.int32]
Ids = npt.NDArray[np.int64]
NO_IDS: Ids = np.empty(0, np.int64)
NO_MASK: Mask = np.empty(0, np.uint32)
MOST_TOP_K = 2**31 - 1


class SeenTokens:
    """The distinct tokens of a sequence, and how often each was generated. It grows with the sequence."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_seen = 0
        self._places: dict[int, int] = {}
        self._ids, self._counts = np.empty(0, np.int64), np.empty(0, np.int64)

    def of(self, tokens: TokenArray) -> tuple[Ids, Ids]:
        """Return views of the distinct ids and their counts, valid until the next call."""
        if len(tokens) < self._num_seen or self._num_seen < self._num_prompt_tokens:
            self._begin(tokens)
        for token in tokens[self._num_seen :].tolist():
            self._add(token)
        self._num_seen = len(tokens)
        return self._ids[: len(self._places)], self._counts[: len(self._places)]

    def _begin(self, tokens: TokenArray) -> None:
        prompt = np.unique(tokens[: self._num_prompt_tokens]).astype(np.int64)
        self._ids, self._counts = prompt, np.zeros(len(prompt), np.int64)
        self._places = {token: index for index, token in enumerate(prompt.tolist())}
        self._num_seen = self._num_prompt_tokens

    def _add(self, token: int) -> None:
        index = self._places.setdefault(token, len(self._places))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(index + 8, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(index + 8, np.int64)])
        self._ids[index] = token
        self._counts[index] += 1


class SampledRow:
    """The rules of one sequence, made once. A rule that does not apply is empty or None.

    params: after the model's defaults. stop_ids: the tokens that end the sequence. guided: its way through a guide.
    """

    def __init__(
        self,
        params: LogitsParams,
        stop_ids: Iterable[int],
        num_prompt_tokens: int,
        max_tokens: int = 16,
        guided: GuidedSequence | None = None,
    ) -> None:
        self._tables: TokenTables | None = None
        self.params, self.num_prompt_tokens, self.max_tokens = params, num_prompt_tokens, max_tokens
        self.guided, self.mask = guided, None if guided is None else NO_MASK
        self.changes_logits = params.changes_logits or guided is not None
        self.stop_ids = _as_ids(sorted(stop_ids))
        self.penalties = (
            1.0 if params.repetition_penalty is None else params.repetition_penalty,
            params.presence_penalty or 0.0,
            params.frequency_penalty or 0.0,
        )
        self.seen = SeenTokens(num_prompt_tokens) if self.penalties != (1.0, 0.0, 0.0) else None
        self.biased_ids, self.biases = _summed_biases(params.logit_bias or ())
        self.suppressed_ids = _as_ids(params.suppress_tokens or ())
        self.first_ids = _as_ids(params.begin_suppress_tokens or ())
        is_late = num_prompt_tokens <= 1 and params.forced_bos_token_id is not None
        self.first_at = num_prompt_tokens + is_late
        shortest = params.min_length or 0
        self.barred_until = max(shortest, num_prompt_tokens + params.min_tokens if params.min_tokens else 0)

    @cached_property
    def library(self) -> LibraryProcessors | None:
        """The rules that transformers' own processors apply."""
        if not asks_library(self.params):
            return None
        return LibraryProcessors(self.params, self.stop_ids, self.num_prompt_tokens, self.max_tokens)

    @cached_property
    def warping(self) -> tuple[float, float, float, float]:
        """temperature, top_k, top_p and min_p. A greedy sequence has temperature 0; 0, 1 and 0 cut nothing off."""
        params = self.params
        if not isinstance(params, SamplingParams) or params.is_greedy:
            return 0.0, 0.0, 1.0, 0.0
        if self.library is not None and self.library.takes_over_drawing:
            return params.temperature or 0.0, 0.0, 1.0, 0.0
        top_p = 1.0 if params.top_p is None else params.top_p
        return params.temperature or 0.0, params.top_k or 0.0, top_p, params.min_p or 0.0

    @cached_property
    def packed(self) -> bytes:
        """The record of `sample_rows`, with seed and position 0. It is empty where the library's processors run."""
        if self.library is not None:
            return b""
        temperature, top_k, top_p, min_p = self.warping
        if temperature == 0:
            return GREEDY
        clipped = min(max(temperature, LEAST_TEMPERATURE), MOST_TEMPERATURE)
        with np.errstate(divide="ignore"):
            least_score = np.log(min_p)
        num_kept = min(int(top_k), MOST_TOP_K)
        return packed(SamplingRecord(top_k=num_kept, top_p=top_p, temperature=clipped, least_score=least_score))

    def tables_on(self, device: torch.device, vocab_size: int) -> TokenTables | None:
        """Return the rules that name tokens as tables, kept from call to call; None where the library's processors run.

        vocab_size: logits of a row.
        """
        if self.library is not None:
            return None
        if self._tables is None or not self._tables.serves(vocab_size, device):
            ends_late = self.barred_until > self.num_prompt_tokens
            barred = self.suppressed_ids, self.stop_ids if ends_late else NO_IDS, self.first_ids
            counts, is_guided = self.seen is not None, self.guided is not None
            named = NamedTokens(self.biased_ids, self.biases, *barred, counts, self.num_prompt_tokens, is_guided)
            self._tables = TokenTables(named, vocab_size, device)
        return self._tables

    @cached_property
    def token_rules(self) -> _C.TokenRules | None:
        """The rules of `sample_rows` that name tokens; None where there are none, or the library's processors run."""
        shortest = self.barred_until if len(self.stop_ids) else 0
        is_ruled = len(self.biased_ids) or len(self.suppressed_ids) or len(self.first_ids) or self.guided is not None
        if not (self.seen is not None or is_ruled or shortest > self.num_prompt_tokens) or self.library is not None:
            return None
        return _C.TokenRules(
            biased_ids=self.biased_ids,
            biases=self.biases,
            stop_ids=self.stop_ids,
            shortest=shortest,
            suppressed_ids=self.suppressed_ids,
            first_ids=self.first_ids,
            first_at=self.first_at,
            penalties=self.penalties,
            num_prompt_tokens=self.num_prompt_tokens,
        )

    @property
    def needs_tokens(self) -> bool:
        """Whether the sequence's tokens must be known to choose the next one."""
        return self.seen is not None or self.guided is not None or self.library is not None

    def follow_guide(self, generated: TokenArray) -> None:
        """Let `mask` say which tokens may come after the generated ones; for a sequence with a guide."""
        assert self.guided is not None, "only guided sequences have a mask"
        self.mask = self.guided.mask(generated)

    def barred_ids(self, num_tokens: int) -> Ids:
        """Return the tokens that must not come yet, after `num_tokens` tokens."""
        return self.stop_ids if num_tokens < self.barred_until else NO_IDS

    def unwanted_ids(self, num_tokens: int) -> Ids:
        """Return the tokens that must not come next, after `num_tokens` tokens."""
        if len(self.first_ids) and num_tokens == self.first_at:
            return np.concatenate([self.suppressed_ids, self.first_ids])
        return self.suppressed_ids


def _summed_biases(biases: Iterable[tuple[int, float]]) -> tuple[Ids, npt.NDArray[np.float32]]:
    """Return the ids, each once, and the sums of their biases: so a logit is rounded once, wherever they are added."""
    pairs = list(biases)
    ids, places = np.unique(_as_ids([token for token, _ in pairs]), return_inverse=True)
    sums = np.zeros(len(ids), np.float32)
    np.add.at(sums, places, np.array([bias for _, bias in pairs], np.float32))
    return ids, sums


def _as_ids(tokens: Sequence[int]) -> Ids:
    return np.array(tokens, np.int64)
