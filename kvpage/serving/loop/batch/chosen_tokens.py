"""ChosenTokens: the tokens that a batch's logits give, and the requests whose logits give none.

Prompts that are scored get the log-probabilities of their tokens here, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvpage.serving.loop.batch.batch import Batch, Portion
from kvpage.serving.loop.batch.logprobs import logprobs_asked, logprobs_of_rows
from kvpage.serving.loop.request import Request
from kvpage.serving.sampling.logits_check import LogitsNotFinite, rows_not_finite
from kvpage.serving.sampling.sampler import sample
from kvpage.serving.text.token_logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The outcome of a batch.

    batch: the tokens of requests that go on. failed: the other requests, whose logits are no numbers.
    prefilled: those that go on and have computed the last portion of their prefill. forks: the requests that some of
    these become besides themselves. token_ids: int32, one for each decode, then for each of prefilled, then for each
    fork. logprobs: of the requests that ask for them.
    """

    batch: Batch
    failed: list[Request]
    prefilled: list[Request]
    forks: dict[Request, list[Request]]
    token_ids: npt.NDArray[np.int32]
    logprobs: dict[Request, TokenLogprobs] = field(default_factory=dict)

    @property
    def new_requests(self) -> list[Request]:
        """The forks, in order."""
        return [fork for forks in self.forks.values() for fork in forks] if self.forks else []


def choose_tokens(batch: Batch, logits: torch.Tensor) -> ChosenTokens:
    """Choose the next tokens. logits: [len(batch), vocab_size], after the last token of each decode and portion."""
    if not batch.prefills:
        try:
            tokens = batch.decodes.sample(logits)
            logprobs = logprobs_asked(logits, batch.decodes.requests, tokens) if batch.decodes.needs_logits else {}
            return ChosenTokens(batch, [], [], {}, tokens, logprobs)
        except LogitsNotFinite:
            pass  # found again below, with the requests that fail
    num_decodes = len(batch.decodes)
    last = [row for row, portion in enumerate(batch.prefills, num_decodes) if portion.is_last]
    rows = [*range(num_decodes), *last]
    failed = _failed_parts(batch, logits, rows) if len(rows) < len(batch) else []
    going = batch.without(failed) if failed else batch
    while True:
        prefilled = [portion.request for portion in going.prefills if portion.is_last]
        due = going.decodes.requests + prefilled
        forks = {request: request.forks() for request in prefilled if request.num_forks_due}
        try:
            chosen_logits, requests = _with_forks(logits, rows, due, forks)
            tokens = np.array(sample(chosen_logits, requests), np.int32)
            logprobs = logprobs_asked(chosen_logits, requests, tokens)
            return ChosenTokens(going, failed, prefilled, forks, tokens, logprobs)
        except LogitsNotFinite as error:
            bad = _owners(error.rows, due, forks)
            failed += bad
            rows = [row for row, request in zip(rows, due, strict=True) if request not in bad]
            going = going.without(bad)


def chosen_of_decodes(batch: Batch, token_ids: npt.NDArray[np.int64]) -> ChosenTokens:
    """Return the outcome of decodes whose next tokens are known: -1 for logits that are no numbers."""
    tokens = token_ids.astype(np.int32)
    if np.minimum.reduce(tokens) >= 0:
        return ChosenTokens(batch, [], [], {}, tokens)
    is_bad = tokens < 0
    failed = [batch.decodes.requests[row] for row in np.flatnonzero(is_bad).tolist()]
    return ChosenTokens(batch.without(failed), failed, [], {}, tokens[~is_bad])


def _failed_parts(batch: Batch, logits: torch.Tensor, last_rows: Sequence[int]) -> list[Request]:
    """Return the failed ones of the requests that have more to compute before their next token, at least one."""
    rows = sorted(set(range(len(batch))).difference(last_rows))
    requests = batch.requests
    return [requests[rows[index]] for index in rows_not_finite(logits[rows].amax(dim=-1))]


def _with_forks(
    logits: torch.Tensor, rows: Sequence[int], due: Sequence[Request], forks: dict[Request, list[Request]]
) -> tuple[torch.Tensor, list[Request]]:
    """Return the rows of the due requests, then that of each again for each of its forks; and their requests."""
    if not forks:
        return logits if len(rows) == len(logits) else logits[list(rows)], list(due)
    row_of = dict(zip(due, rows, strict=True))
    new = [(row_of[request], fork) for request, request_forks in forks.items() for fork in request_forks]
    return logits[[*rows, *(row for row, _ in new)]], [*due, *(fork for _, fork in new)]


def _owners(rows: Sequence[int], due: Sequence[Request], forks: dict[Request, list[Request]]) -> list[Request]:
    """Return the due requests of these rows of `_with_forks`, each once."""
    owners = [*due, *(request for request, request_forks in forks.items() for _ in request_forks)]
    return list(dict.fromkeys(owners[row] for row in rows))


def take_prompt_logprobs(batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """Give prompts their log-probabilities; return the logits after each decode and portion: [len(batch), vocab_size].

    logits: of the wanted rows, see Batch.packed.
    """
    row, last = len(batch.decodes), list(range(len(batch.decodes)))
    for portion in batch.prefills:
        num_wanted = len(portion.wanted)
        if portion.num_scored:
            _score(portion, logits, row)
        row += num_wanted
        last.append(row - 1)
    return logits[last]


def _score(portion: Portion, logits: torch.Tensor, row: int) -> None:
    """Give a prompt the log-probabilities of the tokens after those of a portion. row: that of its first token."""
    scored, begin, num = portion.request.scored, portion.start + 1, portion.num_scored
    assert scored is not None, "only scored prompts have scored rows"
    next_tokens = portion.request.tokens[begin : begin + num]
    scored.take(begin, logprobs_of_rows(logits, range(row, row + num), next_tokens, [scored.num_top] * num))
