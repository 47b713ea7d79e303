"""Beam search over branches: the same continuations as transformers' `model.generate(num_beams=...)` finds.

    running      [ a: -0.3   b: -0.9 ]         scores: sums of log-probabilities
    candidates   [ a5 -0.5   b1 -1.0   aE -1.1   b7 -1.6 ]    best first, over all beams and tokens; E ends
    running      [ a5 -0.5   b1 -1.0 ]         the best that go on; a's branch becomes a5, b's becomes b1
    finished     [ ]                           aE is not among the first num_beams: it does not count

A beam that goes on more than once is forked, one that does not is released; nothing is copied but the last, partly
filled block of each fork.
"""

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage.errors import OutOfBlocks
from kvpage.sequence_args import check_namespace
from kvpage.serving.branches import Branch, Branches
from kvpage.serving.logits_check import LogitsNotFinite
from kvpage.serving.sampling_params import is_int
from kvpage.tokens import Tokens

if TYPE_CHECKING:
    from kvpage.serving.engine import Engine


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Frozen and validated; the names and meanings of transformers' GenerationConfig.

    num_beams: continuations that are followed at once.
    max_tokens: how many tokens are generated at most.
    num_return_sequences: how many of them are returned, the best first.
    length_penalty: a finished beam is ranked by its score / (generated tokens ** length_penalty).
    early_stopping: True ends with the num_beams-th finished one; False when the best running beam, at its present
        length, is no better than the worst finished one; "never" when it could not become better at any length.
    stop_token_ids, ignore_eos: as in SamplingParams.
    """

    num_beams: int = 4
    max_tokens: int = 16
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("num_beams", "max_tokens", "num_return_sequences"):
            if not is_int(getattr(self, name)) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, got {getattr(self, name)!r}")
        if self.num_return_sequences > self.num_beams:
            raise ValueError(
                f"num_return_sequences must be at most num_beams={self.num_beams}, got {self.num_return_sequences}"
            )
        if not isinstance(self.length_penalty, numbers.Real):
            raise ValueError(f"length_penalty must be a number, got {type(self.length_penalty).__name__}")
        if not -float("inf") < self.length_penalty < float("inf"):
            raise ValueError(f"length_penalty must be finite, got {self.length_penalty!r}")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(f"early_stopping must be True, False or 'never', got {self.early_stopping!r}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not all(is_int(token) for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must be integers, got {self.stop_token_ids!r}")


class Beam(NamedTuple):
    """A finished continuation: its tokens, a stop token included, and its score after the length penalty."""

    token_ids: list[int]
    score: float


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """beams: the best first. num_cached_tokens: of the prompt, found in the cache.

    error: why there are no beams, where logits were no numbers; else None.
    """

    prompt_token_ids: list[int]
    beams: tuple[Beam, ...]
    num_cached_tokens: int
    error: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """Those of the best; none with an error."""
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

    def step(self, logits: torch.Tensor) -> None:
        """Goes one token on. logits: [len(running), vocab_size]. Nothing runs any more when the search is over."""
        candidates = self._candidates(logits)
        self._num_generated += 1
        is_last = self._num_generated == self.params.max_tokens
        ends = [is_last or candidate.token in self._stop_ids for candidate in candidates]
        for candidate, is_end in zip(candidates[: self.params.num_beams], ends, strict=False):
            if is_end:
                self._finish(candidate)
        going = [candidate for candidate, is_end in zip(candidates, ends, strict=True) if not is_end]
        going = going[: self.params.num_beams]
        self._follow([] if not going or self._is_over(going[0].score) else going)

    def output(self) -> BeamSearchOutput:
        beams = tuple(self.finished[: self.params.num_return_sequences])
        return BeamSearchOutput(self.prompt.tolist(), beams, self.num_cached_tokens, self.error)

    def fail(self) -> None:
        """Ends the search, whose logits are no numbers, without a beam."""
        self.error = str(LogitsNotFinite([0], ["this prompt's beams"]))
        self.finished = []
        self._follow([])

    def _candidates(self, logits: torch.Tensor) -> list[_Candidate]:
        """The best continuations: so many that num_beams go on even if each beam ends with each stop token."""
        sums = logits.float().log_softmax(dim=-1) + self._scores[:, None].to(logits.device)
        count = min(max(2, 1 + len(self._stop_ids)) * self.params.num_beams, sums.numel())
        scores, indices = sums.flatten().topk(count)
        vocab_size = logits.shape[-1]
        pairs = zip(scores.tolist(), indices.tolist(), strict=True)
        return [_Candidate(score, index // vocab_size, index % vocab_size) for score, index in pairs]

    def _finish(self, candidate: _Candidate) -> None:
        generated = self.running[candidate.parent].token_ids[len(self.prompt) :].tolist()
        score = _penalized(candidate.score, self._num_generated, self.params.length_penalty)
        self.finished.append(Beam([*generated, candidate.token], score))
        self.finished.sort(key=lambda beam: -beam.score)  # stable: of equals the first comes first
        del self.finished[self.params.num_beams :]

    def _is_over(self, best_running: float) -> bool:
        params = self.params
        if len(self.finished) < params.num_beams:
            return False
        if params.early_stopping is True:
            return True
        at_its_longest = params.early_stopping == "never" and params.length_penalty > 0
        length = params.max_tokens if at_its_longest else self._num_generated
        return _penalized(best_running, length, params.length_penalty) <= self.finished[-1].score

    def _follow(self, candidates: Sequence[_Candidate]) -> None:
        """The candidates run from now on; the first of a parent takes its branch, others a fork of it."""
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
    """In fp32, as transformers does."""
    return float(torch.tensor(score) / length**penalty)


def search_beams(
    engine: "Engine", prompts: Sequence[Tokens], params: BeamSearchParams, namespace: bytes
) -> list[BeamSearchOutput]:
    """See Engine.beam_search. As many prompts at once as the engine runs sequences."""
    if not isinstance(params, BeamSearchParams):
        raise TypeError(f"params must be BeamSearchParams, got {type(params).__name__}")
    check_namespace(namespace)
    checked = [engine.check_tokens(prompt) for prompt in prompts]
    for prompt in checked:
        engine.check_length(len(prompt), params.max_tokens)
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else engine.eos_token_ids)
    num_at_once = max(engine.scheduler.max_num_seqs // params.num_beams, 1)
    groups = [checked[begin : begin + num_at_once] for begin in range(0, len(checked), num_at_once)]
    return [output for group in groups for output in _search_group(engine, group, params, stop_ids, namespace)]


def _search_group(
    engine: "Engine",
    prompts: Sequence[npt.NDArray[np.int32]],
    params: BeamSearchParams,
    stop_ids: frozenset[int],
    namespace: bytes,
) -> list[BeamSearchOutput]:
    """All prompts side by side; where blocks lack for that, one half after the other."""
    try:
        with Branches(engine) as branches:
            searches = [_Search(branches, branches.start(one, namespace), params, stop_ids) for one in prompts]
            _run(branches, searches)
            return [search.output() for search in searches]
    except OutOfBlocks:
        if len(prompts) == 1:
            raise
    middle = len(prompts) // 2
    halves = prompts[:middle], prompts[middle:]
    return [output for half in halves for output in _search_group(engine, half, params, stop_ids, namespace)]


def _run(branches: Branches, searches: Sequence[_Search]) -> None:
    while running := [branch for search in searches for branch in search.running]:
        try:
            logits = branches.compute(running).split([len(search.running) for search in searches])
        except LogitsNotFinite as error:
            bad = {running[row] for row in error.rows}
            for search in searches:
                if bad.intersection(search.running):
                    search.fail()
            continue
        for search, rows in zip(searches, logits, strict=True):
            if search.running:
                search.step(rows)
