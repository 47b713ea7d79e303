"""ChosenTokens: the tokens that a batch's logits give, and the requests whose logits give none."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvpage.serving.loop.request import Batch, Request
from kvpage.serving.sampling.logits_check import LogitsNotFinite, rows_not_finite
from kvpage.serving.sampling.sampler import sample


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The outcome of a batch.

    batch: the portions of requests that go on. failed: the other requests, whose logits are no numbers.
    due: those that go on and have computed their last portion. forks: the requests that some of them become besides
    themselves. token_ids: one for each of due, then one for each fork.
    """

    batch: Batch
    failed: list[Request]
    due: list[Request]
    forks: dict[Request, list[Request]]
    token_ids: list[int]

    @property
    def new_requests(self) -> list[Request]:
        """The forks, in order."""
        return [fork for each in self.forks.values() for fork in each]

    @property
    def requests(self) -> list[Request]:
        """The requests of token_ids."""
        return self.due + self.new_requests


def choose_tokens(batch: Batch, logits: torch.Tensor) -> ChosenTokens:
    """Choose the next tokens. logits: [len(batch.portions), vocab_size], after the last token of each portion."""
    portions = batch.portions
    rows = [row for row, portion in enumerate(portions) if portion.is_last]
    failed = _failed_parts(batch, logits, rows) if len(rows) < len(portions) else []
    while True:
        due = [portions[row].request for row in rows]
        forks = {request: request.forks() for request in due if request.num_forks_due}
        try:
            tokens = sample(*_with_forks(logits, rows, due, forks))
            break
        except LogitsNotFinite as error:
            bad = _owners(error.rows, due, forks)
            failed += bad
            rows = [row for row in rows if portions[row].request not in bad]
    going = Batch([portion for portion in portions if portion.request not in failed]) if failed else batch
    return ChosenTokens(going, failed, due, forks, tokens)


def _failed_parts(batch: Batch, logits: torch.Tensor, last_rows: Sequence[int]) -> list[Request]:
    """Return the failed ones of the requests that have more to compute before their next token, at least one."""
    rows = sorted(set(range(len(batch.portions))).difference(last_rows))
    return [batch.portions[rows[index]].request for index in rows_not_finite(logits[rows].amax(dim=-1))]


def _with_forks(
    logits: torch.Tensor, rows: Sequence[int], due: Sequence[Request], forks: dict[Request, list[Request]]
) -> tuple[torch.Tensor, list[Request]]:
    """Return the rows of the due requests, then that of each again for each of its forks; and their requests."""
    if not forks:
        return logits if len(rows) == len(logits) else logits[list(rows)], list(due)
    row_of = dict(zip(due, rows, strict=True))
    new = [(row_of[request], fork) for request, each in forks.items() for fork in each]
    return logits[[*rows, *(row for row, _ in new)]], [*due, *(fork for _, fork in new)]


def _owners(rows: Sequence[int], due: Sequence[Request], forks: dict[Request, list[Request]]) -> list[Request]:
    """Return the due requests of these rows of `_with_forks`, each once."""
    owners = [*due, *(request for request, each in forks.items() for _ in each)]
    return list(dict.fromkeys(owners[row] for row in rows))
