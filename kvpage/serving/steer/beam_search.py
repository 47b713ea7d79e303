"""Beam search over branches: the same continuations as transformers' `model.generate(num_beams=...)` finds.

    running      [ a: -0.3   b: -0.9 ]         scores: sums of log-probabilities
    candidates   [ a5 -0.5   b1 -1.0   aE -1.1   b7 -1.6 ]    best first, over all beams and tokens; E ends
    running      [ a5 -0.5   b1 -1.0 ]         the best that go on; a's branch becomes a5, b's becomes b1
    finished     [ ]                           aE is not among the first num_beams: it does not count

A beam that goes on more than once is forked, one that does not is released; nothing is copied but the last, partly
filled block of each fork.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.tokens import Tokens
from kvpage.checks.values import check_namespace
from kvpage.serving.params.beam import BeamSearchParams
from kvpage.serving.sampling.log_softmax import log_softmax
from kvpage.serving.sampling.logits_check import LogitsNotFinite
from kvpage.serving.sampling.logits_processing import process_logits, watermark
from kvpage.serving.sampling.sampled_row import SampledRow
from kvpage.serving.steer.branches import Branch, Branches
from kvpage.serving.steer.steerable import SteerableEngine


class Beam(NamedTuple):
    """A finished continuation: its tokens, a stop token included, and its score after the length penalty."""

    token_ids: list[int]
    score: float


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The outcome of a beam search for one prompt.

    Attributes:
        prompt_token_ids: The prompt.
        beams: The best first; empty with an error.
        num_cached_tokens: Leading tokens of the prompt that were found in the cache.
        error: The reason why there are no beams, where logits were no numbers; else None.
    """

    prompt_token_ids: list[int]
    beams: tuple[Beam, ...]
    num_cached_tokens: int
    error: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the best beam; none with an error."""
        return self.beams[0].token_ids if self.beams else []


class _Candidate(NamedTuple):
    score: float
    parent: int  # index of a running beam
    token: int


class _Search:
    """The beams of one prompt."""

    def __init__(self, branches: Branches, branch: Branch, params: BeamSearchParams, stop_ids: frozenset[int]) -> None:
        self.params = params
        self.prompt: npt.NDArray[np.int32] = branch.token_ids.copy()
        self.num_cached_tokens = branch.num_computed
        self.running = [branch]
        self.error: str | None = None
        self.finished: list[Beam] = []  # at most num_beams, the best first
        self._branches = branches
        self._scores = torch.zeros(1)
        self._stop_ids = stop_ids
        self._num_generated = 0
        self._penalty = 1.0 if params.length_penalty is None else params.length_penalty
        assert params.max_tokens is not None
        self._max_tokens = params.max_tokens

    def step(self, logits: torch.Tensor) -> None:
        """Go one token on. logits: [len(running), vocab_size]. No beam runs any more when the search is over."""
        candidates = self._candidates(logits)
        self._num_generated += 1
        is_last = self._num_generated == self._max_tokens
        ends = [is_last or candidate.token in self._stop_ids for candidate in candidates]
        best = zip(candidates[: self.params.num_beams], ends, strict=False)
        ended = [(self._finish(candidate), candidate.parent) for candidate, is_end in best if is_end]
        going = [candidate for candidate, is_end in zip(candidates, ends, strict=True) if not is_end]
        going = going[: self.params.num_beams]
        going = [] if not going or self._is_over(going[0].score) else going
        self._keep_ends(ended, besides={candidate.parent for candidate in going})
        self._follow(going)

    def output(self) -> BeamSearchOutput:
        beams = tuple(self.finished[: self.params.num_return_sequences])
        return BeamSearchOutput(self.prompt.tolist(), beams, self.num_cached_tokens, self.error)

    def fail(self) -> None:
        """End the search, whose logits are no numbers, without a beam."""
        self.error = str(LogitsNotFinite([0], ["this prompt's beams"]))
        self.finished = []
        self._follow([])

    def _candidates(self, logits: torch.Tensor) -> list[_Candidate]:
        """Return the best continuations, enough that num_beams go on even if each beam ends with each stop token."""
        sums = self._processed(log_softmax(logits.float())) + self._scores[:, None].to(logits.device)
        count = min(max(2, 1 + len(self._stop_ids)) * self.params.num_beams, sums.numel())
        scores, indices = sums.flatten().topk(count)
        vocab_size = logits.shape[-1]
        pairs = zip(scores.tolist(), indices.tolist(), strict=True)
        return [_Candidate(score, index // vocab_size, index % vocab_size) for score, index in pairs]

    def _processed(self, scores: torch.Tensor) -> torch.Tensor:
        """Apply penalties and the like to log-probabilities, as transformers does in a beam search."""
        if self.params.changes_logits:
            rows = [SampledRow(self.params, self._stop_ids, len(self.prompt), self._max_tokens) for _ in self.running]
            token_ids = [branch.token_ids for branch in self.running]
            process_logits(scores, rows, token_ids)
            watermark(scores, rows, token_ids)
        return log_softmax(scores) if self.params.renormalize_logits else scores

    def _keep_ends(self, ended: Sequence[tuple[Beam, int]], besides: Set[int]) -> None:
        """Leave the states of the best beams to the next turn. besides: the parents that go on, and leave none."""
        returned = self.finished[: self.params.num_return_sequences]
        for beam, parent in ended:
            if parent not in besides and any(beam is other for other in returned):
                self._branches.keep_end(self.running[parent])

    def _finish(self, candidate: _Candidate) -> Beam:
        generated = self.running[candidate.parent].token_ids[len(self.prompt) :].tolist()
        score = _penalized(candidate.score, self._num_generated, self._penalty)
        beam = Beam([*generated, candidate.token], score)
        self.finished.append(beam)
        self.finished.sort(key=lambda beam: -beam.score)  # stable: of equals the first comes first
        del self.finished[self.params.num_beams :]
        return beam

    def _is_over(self, best_running: float) -> bool:
        params = self.params
        if len(self.finished) < params.num_beams:
            return False
        if params.early_stopping is True:
            return True
        at_its_longest = params.early_stopping == "never" and self._penalty > 0
        length = self._max_tokens if at_its_longest else self._num_generated
        return _penalized(best_running, length, self._penalty) <= self.finished[-1].score

    def _follow(self, candidates: Sequence[_Candidate]) -> None:
        """Run the candidates from now on; the first of a parent takes its branch, others a fork of it."""
        heirs: dict[int, Branch] = {}
        running = []
        for candidate in candidates:
            parent = self.running[candidate.parent]
            branch = self._branches.fork(parent) if candidate.parent in heirs else parent
            heirs.setdefault(candidate.parent, parent)
            running.append(branch)
        self._branches.release(branch for index, branch in enumerate(self.running) if index not in heirs)
        for branch, candidate in zip(running, candidates, strict=True):
            branch.append([candidate.token])
        self.running = running
        self._scores = torch.tensor([candidate.score for candidate in candidates])


def _penalized(score: float, length: int, penalty: float) -> float:
    """Return the score after the length penalty, in fp32 as transformers computes it."""
    return float(torch.tensor(score) / length**penalty)


class _Prompt(NamedTuple):
    """A checked prompt, with nothing left to its defaults."""

    tokens: npt.NDArray[np.int32]
    params: BeamSearchParams
    stop_ids: frozenset[int]


def search_beams(
    engine: SteerableEngine, prompts: Sequence[Tokens], params: BeamSearchParams | None, namespace: bytes
) -> list[BeamSearchOutput]:
    """Search as Engine.beam_search says, for as many prompts at once as the engine runs sequences."""
    if not isinstance(params, BeamSearchParams | None):
        raise TypeError(f"params must be BeamSearchParams, got {type(params).__name__}")
    check_namespace(namespace)
    checked = [_prompt(engine, prompt, params) for prompt in prompts]
    num_beams = max((prompt.params.num_beams for prompt in checked), default=1)
    num_at_once = max(engine.config.max_num_seqs // num_beams, 1)
    groups = [checked[begin : begin + num_at_once] for begin in range(0, len(checked), num_at_once)]
    return [output for group in groups for output in _search_group(engine, group, namespace)]


def _prompt(engine: SteerableEngine, tokens: Tokens, params: BeamSearchParams | None) -> _Prompt:
    checked = engine.check_tokens(tokens)
    params = engine.defaults.beams(params, len(checked), engine.max_model_len)
    engine.check_length(len(checked), params.max_tokens or 0)
    params.check_vocabulary(engine.vocab_size)
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else engine.eos_token_ids)
    return _Prompt(checked, params, stop_ids)


def _search_group(engine: SteerableEngine, prompts: Sequence[_Prompt], namespace: bytes) -> list[BeamSearchOutput]:
    """Search for all prompts side by side; where blocks are short, one half after the other."""
    try:
        with Branches(engine) as branches:
            searches = [_Search(branches, branches.start(prompt.tokens, namespace), *prompt[1:]) for prompt in prompts]
            _run(branches, searches)
            return [search.output() for search in searches]
    except OutOfBlocks:
        if len(prompts) == 1:
            raise
    middle = len(prompts) // 2
    halves = prompts[:middle], prompts[middle:]
    return [output for half in halves for output in _search_group(engine, half, namespace)]


def _run(branches: Branches, searches: Sequence[_Search]) -> None:
    while running := [branch for search in searches for branch in search.running]:
        try:
            logits = torch.split(branches.compute(running), [len(search.running) for search in searches])
        except LogitsNotFinite as error:
            bad = {running[row] for row in error.rows}
            for search in searches:
                if bad.intersection(search.running):
                    search.fail()
            continue
        for search, rows in zip(searches, logits, strict=True):
            if search.running:
                search.step(rows)
