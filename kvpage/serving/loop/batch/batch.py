"""Batch: the tokens that one step computes.

decodes     the newest token of each request that decodes
prefills    a Portion of each of some prompts
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvpage.serving.loop.batch.window_room import WindowRoom
from kvpage.serving.loop.outputs import StepOutput, outputs_of_tokens
from kvpage.serving.loop.request import Request, add_room, append_tokens, note_computed
from kvpage.serving.model.step import BatchItem, PackedTokens
from kvpage.serving.sampling.sampler import Sampler

Item = TypeVar("Item")
Choose = Callable[[torch.Tensor], torch.Tensor]
"""Returns a token for each row of logits, on their device; -1 where these are no numbers."""


class Portion(NamedTuple):
    """The tokens [start, end) of a request, which one step computes."""

    request: Request
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        """Whether the logits of its last row give the request's next token."""
        return self.end == self.request.num_tokens

    @property
    def num_scored(self) -> int:
        """How many of its first tokens have a next one in the prompt whose log-probability is asked for."""
        if not self.request.scores_prompt:
            return 0
        return max(min(self.end, self.request.num_prompt_tokens - 1) - self.start, 0)

    @property
    def wanted(self) -> list[int]:
        """The indices of the tokens whose logits are needed: the scored ones, and the last one.

        That is wanted also where it is not the prompt's last: K and V that give no numbers are not committed.
        """
        num_scored, last = self.num_scored, self.end - self.start - 1
        return [*range(num_scored), *([last] if num_scored <= last else [])]


class Decodes:
    """Running requests that decode: each computes its newest token, and gets one more.

        requests        [ a    b    c    d  ]
        seq_ids         [ 0    3    4    9  ]     in the block manager, as rows are
        ends            [ 18   6    10   7  ]     int64: tokens of each, the newest included
        newest_tokens   [ 311  5    42   8  ]     int32

    The other columns are made once, for as long as the same requests decode together. `begin` moves these two on to
    the next step.
    """

    def __init__(self, requests: list[Request], rows: npt.NDArray[np.int64]) -> None:
        """Make the columns. rows: of the requests in the block manager, see SequenceSteps."""
        self.requests, self.rows = requests, rows
        self.ends, self.newest_tokens = np.zeros(len(requests), np.int64), np.zeros(len(requests), np.int32)
        self._next: tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]] | None = None  # both, if `take` was the last
        self._num_left = 0  # tokens that the one with the fewest can still get
        self._all = np.arange(len(requests))
        self.seq_ids = [request.seq_id for request in requests]
        self._request_ids = [request.request_id for request in requests]
        self._sample_indices = [request.sample_index for request in requests]
        self._limits = np.array([len(request.tokens) for request in requests], np.int64)
        self._num_prompt_tokens = np.array([request.num_prompt_tokens for request in requests], np.int64)
        self._sampler = Sampler(requests)
        self._stop_ids = [request.stop_ids for request in requests]
        self._all_stop_ids = frozenset[int]().union(*set(self._stop_ids))
        self._watched = [row for row, request in enumerate(requests) if request.answer is not None]
        self._sinks = [request.group.sink for request in requests]
        self._has_sinks = any(sink is not None for sink in self._sinks)

    def __len__(self) -> int:
        return len(self.requests)

    def begin(self) -> None:
        """Take room for the newest tokens, which the block manager has given: a step begins."""
        add_room(self.requests)
        self.go_on()

    def go_on(self) -> None:
        """Move on to the newest tokens, which have room: a step begins."""
        if self._next is None:
            self._read()
            return
        (self.ends, self.newest_tokens), self._next = self._next, None
        self._num_left -= 1

    def _read(self) -> None:
        self.ends = np.array([request.num_tokens for request in self.requests], np.int64)
        self.newest_tokens = np.array([request.newest_token for request in self.requests], np.int32)
        self._num_left = int((self._limits - self.ends).min())

    @cached_property
    def needs_tokens(self) -> bool:
        """Whether the host must know the tokens of a request to choose its next one."""
        return self._sampler.needs_tokens

    @cached_property
    def needs_logits(self) -> bool:
        """Whether the host must know the logits besides the tokens: some request wants log-probabilities."""
        return any(self.requests[row].params.logprobs is not None for row in self._watched)

    @property
    def is_greedy(self) -> bool:
        """Whether all take the likeliest token, by no other rule."""
        return self._sampler.is_greedy

    def chooser(self, num_ahead: int) -> Choose | None:
        """Return a function that chooses tokens on the logits' device; None where all are the likeliest ones.

        num_ahead: how many tokens more than now each will have.
        """
        if self._sampler.is_greedy:
            return None
        return partial(self._sampler.begin, positions=self.ends - self._num_prompt_tokens + num_ahead)

    @property
    def has_last(self) -> bool:
        """Whether the next token is the last one of max_tokens for any."""
        return self._num_left <= 1

    def set_computed(self) -> None:
        """Note that K and V of the newest tokens are in blocks."""
        note_computed(self.requests)

    def that_filled(self, block_size: int) -> list[Request]:
        """Return the requests whose newest token is the last one of a block."""
        if not self.requests:
            return []
        return [self.requests[row] for row in (self.ends % block_size == 0).nonzero()[0].tolist()]

    def packed(self) -> PackedTokens:
        """Return the newest tokens in one row. All are wanted."""
        return PackedTokens(self.newest_tokens, self.ends - 1, self.ends, self._all, is_decode=True)

    def sample(self, logits: torch.Tensor) -> npt.NDArray[np.int32]:
        """Return the next token of each. logits: [len(self), vocab_size]. Raise LogitsNotFinite as `Sampler` does."""
        sampler = self._sampler
        return sampler.sample(logits, self.ends if sampler.is_greedy else self.ends - self._num_prompt_tokens)

    def last_rows(self, tokens: npt.NDArray[np.int32]) -> list[int]:
        """Return the rows of those whose next token may be the last one, or is looked at. tokens: the next ones."""
        rows: list[int] = (self.ends + 1 == self._limits).nonzero()[0].tolist() if self._num_left <= 1 else []
        if self._watched:
            rows = sorted({*rows, *self._watched})
        if not self._all_stop_ids or self._all_stop_ids.isdisjoint(token_ids := tokens.tolist()):
            return rows
        pairs = zip(token_ids, self._stop_ids, strict=True)
        return sorted({*rows, *(row for row, (token, stop_ids) in enumerate(pairs) if token in stop_ids)})

    def take(self, tokens: npt.NDArray[np.int32], default: list[StepOutput], but: Sequence[int] = ()) -> None:
        """Give each its next token, and tell its caller.

        tokens: int32; they are kept. default: takes the outputs of requests without a sink. but: rows to leave out,
            which the caller gives theirs. If one of them ends, other columns are made for the next step.
        """
        self._next = self.ends + 1, tokens
        token_ids = _but(tokens.tolist(), but)
        append_tokens(_but(self.requests, but), token_ids)
        outputs = outputs_of_tokens(_but(self._request_ids, but), token_ids, _but(self._sample_indices, but))
        if not self._has_sinks:
            default += outputs
            return
        for sink, output in zip(_but(self._sinks, but), outputs, strict=True):
            (default if sink is None else sink).append(output)

    def without(self, requests: Iterable[Request]) -> "Decodes":
        """Return the others, amid the same step."""
        gone = set(requests)
        left = [index for index, request in enumerate(self.requests) if request not in gone]
        others = Decodes([self.requests[index] for index in left], self.rows[left])
        others.ends, others.newest_tokens, others._num_left = self.ends[left], self.newest_tokens[left], self._num_left
        return others


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens that one step computes, once the manager's moves are done: decodes first, then prefills."""

    decodes: Decodes
    prefills: list[Portion]

    def __len__(self) -> int:
        return len(self.decodes.requests) + len(self.prefills)

    @property
    def requests(self) -> list[Request]:
        """The requests, in the order of their tokens."""
        return self.decodes.requests + [portion.request for portion in self.prefills]

    @property
    def portions(self) -> list[Portion]:
        """All of it as portions."""
        decodes = zip(self.decodes.requests, self.decodes.ends.tolist(), strict=True)
        return [*(Portion(request, end - 1, end) for request, end in decodes), *self.prefills]

    @property
    def scores_prompts(self) -> bool:
        """Whether the logits of more than last tokens are wanted."""
        return any([portion.request.scores_prompt for portion in self.prefills])

    @property
    def num_tokens(self) -> int:
        """How many tokens all portions have."""
        return len(self.decodes.requests) + sum([portion.end - portion.start for portion in self.prefills])

    def is_too_full_for(self, request: Request, budget: int) -> bool:
        """Whether a request that may blend, and so is not computed in portions, is too long for the rest of the step.

        It then goes with the next step's decodes, beside no other prefill.
        """
        is_too_long = request.num_tokens > budget and request.may_blend
        return is_too_long and any(portion.num_tokens > 1 for portion in self.prefills)

    def without(self, requests: Sequence[Request]) -> "Batch":
        """Return the portions of the other requests."""
        prefills = [portion for portion in self.prefills if portion.request not in requests]
        return Batch(self.decodes.without(requests), prefills)

    def packed(self) -> PackedTokens:
        """Return the tokens in one row. The last one of each sequence is wanted, and see Portion.wanted."""
        decodes, prefills = self.decodes, self.prefills
        if not prefills:
            return decodes.packed()
        starts = np.concatenate([decodes.ends - 1, np.array([portion.start for portion in prefills], np.int64)])
        ends = np.concatenate([decodes.ends, np.array([portion.end for portion in prefills], np.int64)])
        tokens = [decodes.newest_tokens, *(portion.request.tokens[portion.start : portion.end] for portion in prefills)]
        wanted_rows = np.cumsum(ends - starts) - 1
        if self.scores_prompts:
            first = (wanted_rows + 1 - (ends - starts)).tolist()[len(decodes) :]
            rows = [begin + index for begin, portion in zip(first, prefills, strict=True) for index in portion.wanted]
            wanted_rows = np.concatenate([wanted_rows[: len(decodes)], np.array(rows, np.int64)])
        return PackedTokens(np.concatenate(tokens), starts, ends, wanted_rows)

    def items(self) -> list[BatchItem]:
        """Return an item for each portion."""
        return [
            BatchItem(
                portion.request.seq_id,
                portion.request.tokens[portion.start : portion.end],
                portion.start,
                portion.end,
                portion.wanted,
                portion.request.reuse,
            )
            for portion in self.portions
        ]


def add_portion(portions: list[Portion], request: Request, budget: int, room: WindowRoom) -> int:
    """Add as many of the request's next tokens as the budget allows, or all if it blends; return how many.

    Of a step with scored prompts, all together have as many rows of logits as one may have. room: of the windows.
    """
    num_left = request.num_room - request.num_computed
    num_tokens = num_left if request.reuse else min(budget, num_left)
    if request.scores_prompt and request.scored is not None:
        num_scored = sum([portion.num_scored for portion in portions])
        num_tokens = min(num_tokens, max(request.scored.max_rows - num_scored, 0))
    if num_tokens:
        num_tokens = room.reach(request, request.num_computed + num_tokens) - request.num_computed
    if num_tokens:
        portions.append(Portion(request, request.num_computed, request.num_computed + num_tokens))
    return num_tokens


def _but(column: Sequence[Item], rows: Sequence[int]) -> Sequence[Item]:
    """Return the column without these rows."""
    if not rows:
        return column
    left_out = set(rows)
    return [item for row, item in enumerate(column) if row not in left_out]
