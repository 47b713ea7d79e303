"""Delivered: the tokens of a request that its reader has, so that a second worker's copies of them are left out.

first worker    a  b  c  (lost)
second worker   a  b  c  d  e        the same tokens again: same prompt, same seed
reader          a  b  c  d  e
"""

from collections.abc import Sequence

from kvpage.integrations.remote.calls import WorkerLost
from kvpage.serving.loop.outputs import RequestOutput, Sample, StepOutput


class Diverged(WorkerLost):
    """A second worker has computed other tokens than the reader has already."""


class Delivered:
    """The tokens of each sample of one request. output: the outcome, once it has come."""

    def __init__(self, request_id: str, num_samples: int) -> None:
        self.request_id = request_id
        self.output: RequestOutput | None = None
        self._tokens: list[list[int]] = [[] for _ in range(num_samples)]
        self._num_seen = [0] * num_samples
        self._is_over = [False] * num_samples

    def restart(self) -> None:
        """Expect everything again, from the first token on."""
        self._num_seen = [0] * len(self._tokens)

    @property
    def has_tokens(self) -> bool:
        """Whether the reader has any token."""
        return any(self._tokens)

    @property
    def num_tokens(self) -> int:
        """How many tokens the reader has, of all samples."""
        return sum(map(len, self._tokens))

    def fresh(self, items: Sequence[StepOutput]) -> list[StepOutput]:
        """Return the outputs that the reader lacks. Diverged if a token is another one than before."""
        return [output for output in map(self._fresh, items) if output is not None]

    def early(self, items: Sequence[StepOutput]) -> list[StepOutput]:
        """Return the first tokens of samples that have none yet, and go on elsewhere."""
        first_tokens = []
        for item in items:
            token, index, goes_on = item.token_id, item.sample_index, item.finish_reason in (None, "length")
            if token is not None and goes_on and not self._tokens[index]:
                self._tokens[index].append(token)
                first_tokens.append(StepOutput(self.request_id, token, index, logprobs=item.logprobs))
        return first_tokens

    def partial(self) -> tuple[Sample, ...]:
        """Return the reader's tokens, as samples that were ended."""
        return tuple(Sample(list(tokens), "abort") for tokens in self._tokens)

    def _fresh(self, item: StepOutput) -> StepOutput | None:
        output, index = item._replace(request_id=self.request_id), item.sample_index
        if item.output is not None:
            self.output = item.output
        if item.token_id is None:  # an error, or an end without a token
            return output
        position, tokens = self._num_seen[index], self._tokens[index]
        self._num_seen[index] += 1
        if position == len(tokens):
            tokens.append(item.token_id)
        elif tokens[position] != item.token_id:
            raise Diverged(f"token {position} of sample {index} must be {tokens[position]} again, got {item.token_id}")
        elif item.finish_reason is None or self._is_over[index]:
            return None if item.output is None else output._replace(token_id=None)
        else:
            output = output._replace(token_id=None)  # the token is there, its reason is new
        self._is_over[index] = item.finish_reason is not None
        return output
