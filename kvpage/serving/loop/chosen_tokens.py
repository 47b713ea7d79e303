"""The tokens that come of a batch's logits, and the requests whose logits give none."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvpage.serving.loop.request import Request
from kvpage.serving.loop.scheduler import Batch
from kvpage.serving.sampling.logits_check import LogitsNotFinite, rows_not_finite
from kvpage.serving.sampling.sampler import sample


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """What a batch came to.

    batch: the chunks of requests that go on. failed: the others, whose logits are no numbers.
    due: those that go on and have computed their last chunk. forks: what some of them become besides themselves.
    token_ids: of each of due, then of each fork.
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
        """Those that token_ids are of."""
        return self.due + self.new_requests


def choose_tokens(batch: Batch, logits: torch.Tensor) -> ChosenTokens:
    """logits: [len(batch.chunks), vocab_size], after the last token of each chunk."""
    chunks = batch.chunks
    rows = [row for row, chunk in enumerate(chunks) if chunk.is_last]
    failed = _failed_parts(batch, logits, rows) if len(rows) < len(chunks) else []
    while True:
        due = [chunks[row].request for row in rows]
        forks = {request: request.forks() for request in due if request.num_forks_due}
        try:
            tokens = sample(*_with_forks(logits, rows, due, forks))
            break
        except LogitsNotFinite as error:
            bad = _owners(error.rows, due, forks)
            failed += bad
            rows = [row for row in rows if chunks[row].request not in bad]
    going = Batch([chunk for chunk in chunks if chunk.request not in failed]) if failed else batch
    return ChosenTokens(going, failed, due, forks, tokens)


def _failed_parts(batch: Batch, logits: torch.Tensor, last_rows: Sequence[int]) -> list[Request]:
    """Of the requests that have more to compute before their next token: at least one."""
    rows = sorted(set(range(len(batch.chunks))).difference(last_rows))
    return [batch.chunks[rows[index]].request for index in rows_not_finite(logits[rows].amax(dim=-1))]


def _with_forks(
    logits: torch.Tensor, rows: Sequence[int], due: Sequence[Request], forks: dict[Request, list[Request]]
) -> tuple[torch.Tensor, list[Request]]:
    """The rows of the due requests, then that of each again for each of its forks; and whose they are."""
    if not forks:
        return logits if len(rows) == len(logits) else logits[list(rows)], list(due)
    row_of = dict(zip(due, rows, strict=True))
    new = [(row_of[request], fork) for request, each in forks.items() for fork in each]
    return logits[[*rows, *(row for row, _ in new)]], [*due, *(fork for _, fork in new)]


def _owners(rows: Sequence[int], due: Sequence[Request], forks: dict[Request, list[Request]]) -> list[Request]:
    """The due requests that these rows of `_with_forks` are of, each once."""
    owners = [*due, *(request for request, each in forks.items() for _ in each)]
    return list(dict.fromkeys(owners[row] for row in rows))
