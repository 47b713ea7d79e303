"""ScoringEngine: the log-probabilities of sequences that are given as a whole, by the code that generates tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvpage.checks.tokens import Tokens
from kvpage.serving.loop.outputs import RequestOutput
from kvpage.serving.params.sampling import SamplingParams

_SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)


class ScoringEngine(ABC):
    """What scores sequences, as an Engine does."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Tokens], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Run the prompts to their ends; see Engine.generate."""

    def score(self, sequences: Sequence[Tokens]) -> list[list[float]]:
        """Return the log-probabilities of the tokens of whole sequences, by the model's own logits in fp32.

        With `EngineConfig(same_bits=True)` they are, bit by bit, the `logprob` of the same tokens when they are
        generated. All tokens are computed, cached or not. Other requests go on meanwhile.

        Args:
            sequences: Token ids of each, shorter than `max_model_len`.

        Returns:
            For each sequence a number for each of its tokens but the first, which follows nothing.

        Raises:
            ValueError, TypeError: As `Engine.add_request`, before anything is computed.
            RuntimeError: A sequence could not be computed, with the reason.
        """
        outputs = self.generate(sequences, _SCORED)
        if errors := [output.error for output in outputs if output.error is not None]:
            raise RuntimeError(f"{len(errors)} of {len(outputs)} sequences could not be scored: {errors[0]}")
        return [[token.logprob for token in output.prompt_logprobs or () if token is not None] for output in outputs]
