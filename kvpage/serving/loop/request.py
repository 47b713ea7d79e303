"""Request: one sample of a prompt on its way to its tokens.

    tokens     [ prompt ............ | generated .. |  room for max_tokens  ]
                         ^                        ^ ^
                  num_computed                    | num_tokens
                  (K and V are in blocks)   num_room: positions that have a block; num_committed <= num_computed

A request waits (it has no blocks: num_computed = num_room = 0) or runs. While num_computed < num_room it is in prefill;
a decoding request has one token, its newest, that has no room yet: num_room = num_tokens - 1.

A request for n samples is computed as one until its prompt is done. Then it is forked into n requests, which share the
prompt's blocks and a SampleGroup, and go their own ways from the first token on.
"""

import secrets
import time
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpage.blend.segments import Reuse
from kvpage.blocks.explain import Explanation
from kvpage.serving.blending.blended_prompt import BlendedPrompt
from kvpage.serving.loop.outputs import FinishReason, RequestOutput, Sample, StepOutput
from kvpage.serving.params.sampling import DEFAULT_MAX_TOKENS, MAX_SEED, SamplingParams
from kvpage.serving.sampling.sampled_row import SampledRow
from kvpage.serving.text.answer import Answer, AnswerRules
from kvpage.serving.text.token_logprobs import ScoredPrompt, TokenLogprobs
from kvpage.serving.weights.adapters.adapter import Adapter


@dataclass(slots=True, eq=False)
class SampleGroup:
    """The facts that all samples of one prompt share.

    arrival: how many requests came before. sink: where outputs go; None for those that `Engine.step` returns.
    samples: the requests that exist by now, the first one first. priority: requests with a lower one come first.
    num_cached_tokens: at the first admission. num_loaded_tokens: that the host tier or a store gave for it before.
    answer_rules: of the engine; None gives no answers.
    is_asked, is_found: whether a store was asked for its prompt, and has had some of it.
    explanation: what its first admission found in the cache, and why not more; None where nobody has asked.
    """

    arrival: int
    sink: deque[StepOutput] | None
    samples: list["Request"]
    priority: int = 0
    is_aborted: bool = False
    num_cached_tokens: int | None = None
    arrival_time: float = field(default_factory=time.monotonic)
    first_token_time: float | None = None
    num_loaded_tokens: int = 0
    answer_rules: AnswerRules | None = None
    is_asked: bool = False
    is_found: bool = False
    explanation: Explanation | None = None

    def note_token(self, now: float) -> None:
        """Note that a sample has a new token: the first of all has its time kept."""
        if self.first_token_time is None:
            self.first_token_time = now

    def note_cached(self, num_cached_tokens: int) -> bool:
        """Note how many tokens were cached; return whether this was the first admission."""
        if self.num_cached_tokens is not None:
            return False
        self.num_cached_tokens = num_cached_tokens
        return True

    def note_loaded(self, num_tokens: int) -> None:
        """Note tokens that were loaded for it; those after its first admission are no part of what it found."""
        if self.num_cached_tokens is None:
            self.num_loaded_tokens += num_tokens

    def note_asked(self) -> bool:
        """Note that a store is asked for its prompt; return whether that is the first time."""
        is_first, self.is_asked = not self.is_asked, True
        return is_first

    def note_found(self) -> bool:
        """Note that a store has some of its prompt; return whether that is the first time."""
        is_first, self.is_found = not self.is_found, True
        return is_first

    @property
    def is_admitted(self) -> bool:
        """Whether its prompt has had blocks once."""
        return self.num_cached_tokens is not None

    def abort(self) -> None:
        """Note that the caller has ended all samples."""
        self.is_aborted = True

    def let_go(self) -> None:
        """Forget the samples, which have ended: a cycle would keep their tokens until the garbage collector comes."""
        self.samples = []

    @property
    def is_over(self) -> bool:
        """Whether all samples have finished, or were ended."""
        if self.is_aborted or not self.samples:
            return True
        return not self.samples[0].num_forks_due and all(sample.finish_reason is not None for sample in self.samples)


class Request:
    """The engine's own record of one sample; see the picture above. `tokens` is int32 and never moves."""

    def __init__(
        self,
        request_id: str,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        arrival: int,
        eos_token_ids: frozenset[int] = frozenset(),
        namespace: bytes = b"",
        sink: deque[StepOutput] | None = None,
        blending: BlendedPrompt | None = None,
        priority: int = 0,
        answer_rules: AnswerRules | None = None,
        cache_at: Sequence[int] = (),
    ) -> None:
        self.request_id = request_id
        self.cache_at = cache_at
        self.seq_id: Hashable = request_id  # in the block manager
        self.sample_index = 0
        self.group = SampleGroup(arrival, sink, [self], priority, answer_rules=answer_rules)
        self.params = params
        self.own_namespace = self.namespace = namespace  # the caller's, and the one of its K and V
        self.adapter: Adapter | None = None
        self.is_stale = False  # whether weights have changed since its first K and V were computed
        self.blending = blending
        draws = bool(params.temperature)
        self.seed = secrets.randbelow(MAX_SEED) if params.seed is None and draws else params.seed or 0
        self.stop_ids = frozenset() if params.ignore_eos else eos_token_ids
        if params.stop_token_ids:
            self.stop_ids = self.stop_ids.union(params.stop_token_ids)
        self.num_prompt_tokens = self.num_tokens = len(prompt)
        max_tokens = DEFAULT_MAX_TOKENS if params.max_tokens is None else params.max_tokens
        self.tokens = np.empty(len(prompt) + max_tokens, np.int32)
        self.tokens[: len(prompt)] = prompt
        self._token_memory = self.tokens.data  # of which single tokens are read and written at once
        self.answer: Answer | None = None if answer_rules is None else answer_rules.answer(params, len(prompt))
        self.scored: ScoredPrompt | None = None
        guided = None if self.answer is None else self.answer.guided
        self.sampled_row: SampledRow | None = None  # None where the likeliest token is taken as it is
        if draws or params.changes_logits or guided is not None:
            self.sampled_row = SampledRow(params, self.stop_ids, len(prompt), max_tokens, guided)
        self.num_computed = self.num_committed = self.num_room = 0
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self._text: str | None = None

    # --- the samples of its prompt -----------------------------------------------------------------------------------

    @property
    def order(self) -> tuple[int, int, int]:
        """The place among others: lower ones come first."""
        return self.group.priority, self.group.arrival, self.sample_index

    @property
    def num_forks_due(self) -> int:
        """How many more requests it will become."""
        will_fork = self.sample_index == 0 and self.finish_reason is None
        return self.params.n - len(self.group.samples) if will_fork else 0

    def forks(self) -> list["Request"]:
        """Return the requests that it will become besides itself, each with a seed of its own.

        They have no blocks, and their group does not know them: `join` makes them samples of it.
        """
        begin = len(self.group.samples)
        return [self._fork(index) for index in range(begin, begin + self.num_forks_due)]

    def _fork(self, index: int) -> "Request":
        fork = Request(
            self.request_id,
            self.prompt,
            self.params,
            arrival=0,
            eos_token_ids=self.stop_ids,
            namespace=self.own_namespace,
            answer_rules=self.group.answer_rules,
        )
        fork.enter(self.namespace, self.adapter)
        fork.seq_id, fork.sample_index, fork.group = (self.request_id, index), index, self.group
        fork.seed = (self.seed + index) % MAX_SEED
        return fork

    def join(self, first: "Request | None" = None) -> None:
        """Make a fork a sample of its group. first: whose blocks it has, all of them committed; None if it waits."""
        if first is not None:
            self.num_computed = self.num_committed = first.num_computed
            self.num_room = first.num_room
        self.group.samples.append(self)

    # --- its blocks --------------------------------------------------------------------------------------------------

    @property
    def needs_room(self) -> bool:
        """Whether it decodes, and its newest token has no slot yet."""
        return self.num_room < self.num_tokens

    def admit(self, num_cached_tokens: int) -> bool:
        """Take room for all tokens, num_cached_tokens of them cached; return whether this is the first admission."""
        self.num_computed = self.num_committed = num_cached_tokens
        self.num_room = self.num_tokens
        return self.group.note_cached(num_cached_tokens)

    def set_computed(self, num_computed: int) -> None:
        """Note that K and V of num_computed leading tokens are in blocks."""
        self.num_computed = num_computed

    def set_committed(self) -> None:
        """Note that all computed tokens are committed."""
        self.num_committed = self.num_computed

    def enter(self, namespace: bytes, adapter: Adapter | None) -> None:
        """Have all K and V that are computed from its first token on found in this namespace, by this adapter."""
        self.namespace, self.adapter = namespace, adapter
        if self.blending is not None:
            self.blending.enter(namespace)

    def go_stale(self) -> None:
        """Note that it goes on with K and V of older weights."""
        self.is_stale = True

    def leave_blocks(self) -> None:
        """Go back to waiting, without blocks."""
        self.is_stale = False
        self.num_computed = self.num_committed = self.num_room = 0
        if self.blending is not None:
            self.blending.leave_blocks()

    @property
    def reuse(self) -> Sequence[Reuse]:
        """The segments that the prefill at hand reuses, all of it in one step; empty for an exact one."""
        return () if self.blending is None else self.blending.reuse

    @property
    def may_blend(self) -> bool:
        """Whether segments were found for it, so that it may have to be computed in one step."""
        return self.blending is not None and bool(self.blending.reusable)

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of its prompt are still to be computed, so that all of it must be."""
        return self.scored is not None and not self.scored.is_whole

    # --- its tokens --------------------------------------------------------------------------------------------------

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        """A view of the prompt's tokens."""
        return self.tokens[: self.num_prompt_tokens]

    @property
    def num_generated(self) -> int:
        """How many tokens it has generated."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def newest_token(self) -> int:
        """Its last token by now."""
        return self._token_memory[self.num_tokens - 1]

    @property
    def generated(self) -> npt.NDArray[np.int32]:
        """A view of the tokens it has generated."""
        return self.tokens[self.num_prompt_tokens : self.num_tokens]

    @property
    def generated_token_ids(self) -> list[int]:
        """The tokens it has generated."""
        token_ids: list[int] = self.generated.tolist()
        return token_ids

    def append(self, token_id: int, now: float, logprobs: TokenLogprobs | None = None) -> FinishReason | None:
        """Take a new token, with its log-probabilities if asked for; return why it was the last one, or None."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        self.group.note_token(now)
        is_text_over = self.answer is not None and self.answer.take(self.generated, logprobs)
        if token_id in self.stop_ids or is_text_over:
            self.finish_reason = "stop"
        elif self.num_tokens == len(self.tokens):
            self.finish_reason = "length"
        if self.finish_reason == "length" and self.answer is not None and self.answer.end(self.generated):
            self.finish_reason = "stop"
        if self.finish_reason is not None:
            self._text = self._read_text()  # where the tokenizer may raise: nobody has acted on the end yet
        return self.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the token of `stop_token_ids`, that has ended it; None for another end."""
        if self.answer is not None and self.answer.stop is not None:
            return self.answer.stop
        if self.finish_reason != "stop" or not self.num_generated:
            return None
        return self.newest_token if self.newest_token in self.params.stop_token_ids else None

    def sample(self) -> Sample:
        """Return what it has generated, once it has ended."""
        answer, token_ids = self.answer, self.generated_token_ids
        logprobs = None if answer is None or answer.logprobs is None else answer.logprobs[: len(token_ids)]
        reason = self.finish_reason or "abort"
        return Sample(token_ids, reason, self.error, self.text, self.stop_reason, logprobs)

    @property
    def text(self) -> str | None:
        """The text of what it has generated, once it has ended; None without a tokenizer, and with an error.

        The error may be the tokenizer's own.
        """
        if self._text is None and self.finish_reason == "abort":
            self._text = self._read_text()
        return self._text

    def _read_text(self) -> str | None:
        if self.answer is not None and self.answer.has_text:
            return self.answer.text(self.generated)
        rules = self.group.answer_rules
        return None if rules is None else rules.text(self.generated_token_ids)

    def take_back(self, num_ahead: int = 0, waits: bool = False) -> None:
        """Forget a new token that no caller has seen, when the step of a running request fails.

        num_ahead: the positions that have room for steps after it.
        waits: whether it is a fork without room, which has its first token.
        """
        num_room = self.num_prompt_tokens if waits else self.num_room - num_ahead
        if self.num_tokens > num_room > 0:
            self.num_tokens, self.finish_reason, self._text = num_room, None, None

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End it before its last token."""
        self.finish_reason, self.error, self._text = reason, error, None

    def why_no_token(self) -> str:
        """Return why no next token could be chosen."""
        if self.answer is not None and self.answer.guided is not None:
            why = self.answer.guided.error or "no token is left by its other rules, or the logits are no finite numbers"
            return f"the guide cannot go on after {self.num_generated} tokens: {why}"
        return f"the logits after {self.num_tokens} tokens are no finite numbers"

    def output(self) -> RequestOutput:
        """Return the outcome, once all samples have finished or were aborted."""
        group, first = self.group, self.group.samples[0]
        blending = first.blending
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt.tolist(),
            samples=tuple(sample.sample() for sample in group.samples),
            num_cached_tokens=group.num_cached_tokens or 0,
            arrival_time=group.arrival_time,
            first_token_time=group.first_token_time,
            finish_time=time.monotonic(),
            num_reused_tokens=0 if blending is None else blending.num_reused_tokens,
            num_recomputed_tokens=0 if blending is None else blending.num_recomputed_tokens,
            prompt_logprobs=None if first.scored is None else first.scored.logprobs,
            num_loaded_tokens=min(group.num_loaded_tokens, group.num_cached_tokens or 0),
            explanation=group.explanation,
        )


# --- many requests that decode ---------------------------------------------------------------------------------------


def add_room(requests: Iterable[Request]) -> None:
    """Take room for the newest token of each."""
    for request in requests:
        request.num_room += 1


def note_computed(requests: Iterable[Request]) -> None:
    """Note that K and V of one more token of each are in blocks, and committed."""
    for request in requests:
        request.num_committed = request.num_computed = request.num_computed + 1


def append_tokens(requests: Sequence[Request], token_ids: Sequence[int]) -> None:
    """Append a new token to each, which is neither its first one nor its last."""
    for request, token in zip(requests, token_ids, strict=True):
        end = request.num_tokens
        request._token_memory[end] = token
        request.num_tokens = end + 1


Entry = tuple[Request, bytes, Adapter | None]
"""A request, the namespace of its K and V, and the adapter that computes them."""
