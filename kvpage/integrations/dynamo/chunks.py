"""ChunkWriter: the tokens of one request as chunks of Dynamo's stream.

    StepOutput, StepOutput, ... ─► {"token_ids": [5, 9], "index": 0}
    the last one                ─► {"token_ids": [1], "index": 0, "finish_reason": "stop", "completion_usage": {...}}

Tokens of one turn come in one chunk. `index` is the sample: there is one.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from kvpage.serving import RequestOutput, StepOutput, TokenLogprobs

Chunk = dict[str, Any]
REASONS = {"stop": "stop", "length": "length", "abort": "cancelled", "error": "error"}
LEAST_LOGPROB = -1e30  # of an impossible token: JSON has no infinity


class ChunkWriter:
    """Writes the chunks of one request."""

    def __init__(self, num_prompt_tokens: int, decode: Callable[[int], str], shows_ids: bool = False) -> None:
        """Make a writer.

        Args:
            num_prompt_tokens: Tokens of the prompt.
            decode: Returns a token's text, which stands beside log-probabilities.
            shows_ids: Give "token_id:17" in place of the text.
        """
        self._num_prompt_tokens, self._shows_ids = num_prompt_tokens, shows_ids
        self._decode = decode

    def chunk(self, outputs: Sequence[StepOutput]) -> Chunk:
        """Return the outputs of one turn as a chunk.

        Args:
            outputs: In the order of their steps, at least one.
        """
        tokens = [output for output in outputs if output.token_id is not None]
        chunk: Chunk = {"token_ids": [output.token_id for output in tokens], "index": 0}
        if tokens and tokens[0].logprobs is not None:
            chunk["log_probs"] = [_finite(output.logprobs.logprob) for output in tokens if output.logprobs]
            if any(output.logprobs and output.logprobs.top for output in tokens):
                chunk["top_logprobs"] = [self._top(output.logprobs) for output in tokens if output.logprobs]
        last = outputs[-1]
        if last.finish_reason is not None:
            chunk["finish_reason"] = REASONS[last.finish_reason]
        if last.output is not None:
            chunk["completion_usage"] = self.usage(last.output)
            if last.output.prompt_logprobs is not None:
                chunk["engine_data"] = {"prompt_logprobs": self._of_prompt(last.output)}
        return chunk

    def usage(self, output: RequestOutput) -> dict[str, Any]:
        """Return the numbers of tokens of a request that has ended.

        Args:
            output: Its outcome.
        """
        num_generated = len(output.token_ids)
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": self._num_prompt_tokens + num_generated,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        }

    def _top(self, logprobs: TokenLogprobs) -> list[dict[str, Any]]:
        return [
            {"rank": rank, "token_id": token_id, "token": self._text(token_id), "logprob": _finite(logprob)}
            for rank, (token_id, logprob) in enumerate(logprobs.top, 1)
        ]

    def _of_prompt(self, output: RequestOutput) -> list[dict[str, Any] | None]:
        """Return an entry for each token of the prompt, by ids as text. The first token has none."""
        by_token: list[dict[str, Any] | None] = []
        for token_id, logprobs in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True):
            if logprobs is None:
                by_token.append(None)
                continue
            entries = {
                str(other): self._entry(other, value, rank) for rank, (other, value) in enumerate(logprobs.top, 1)
            }
            entries[str(token_id)] = self._entry(token_id, logprobs.logprob, logprobs.rank)
            by_token.append(entries)
        return by_token

    def _entry(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._text(token_id)}

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._shows_ids else self._decode(token_id)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB
