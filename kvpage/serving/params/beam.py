"""BeamSearchParams: how a beam search goes, and when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvpage.serving.params import field_checks as checks
from kvpage.serving.params.generation_defaults import Unserved, beam_call_fields
from kvpage.serving.params.logits import LogitsParams

CHECKS: dict[str, checks.Check] = {
    "num_beams": checks.POSITIVE,
    "max_tokens": checks.POSITIVE,
    "num_return_sequences": checks.POSITIVE,
    "length_penalty": checks.FINITE,
    "ignore_eos": checks.flag,
    "stop_token_ids": checks.token_ids,
}


@dataclass(frozen=True, slots=True)
class BeamSearchParams(LogitsParams):
    """Frozen and validated; the names and meanings of transformers' GenerationConfig. See LogitsParams for what else
    may be done to the log-probabilities. None takes the default of the model's generation config.

    num_beams: continuations that are followed at once.
    max_tokens: how many tokens are generated at most; 16 if nobody says.
    num_return_sequences: how many of them are returned, the best first.
    length_penalty: a finished beam is ranked by its score / (generated tokens ** length_penalty); 1 if nobody says.
    early_stopping: True ends with the num_beams-th finished one; False, also if nobody says, when the best running
        beam, at its present length, is no better than the worst finished one; "never" when it could not become better
        at any length.
    stop_token_ids, ignore_eos: as in SamplingParams.
    """

    num_beams: int = 4
    max_tokens: int | None = None
    num_return_sequences: int = 1
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        LogitsParams.__post_init__(self)
        checks.check_given(self, ("num_beams", "num_return_sequences", "stop_token_ids", "ignore_eos"))
        checks.check_fields(self, CHECKS)
        if self.num_return_sequences > self.num_beams:
            raise ValueError(
                f"num_return_sequences must be at most num_beams={self.num_beams}, got {self.num_return_sequences}"
            )
        if not (self.early_stopping is None or isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(f"early_stopping must be True, False or 'never', got {self.early_stopping!r}")

    @classmethod
    def from_generation_config(
        cls, generation_config: Any, unserved: Unserved = "refuse", **changes: Any
    ) -> "BeamSearchParams":
        """The beam search of `model.generate` by this GenerationConfig, without other arguments; `changes` go first.

        unserved: whether what is asked for and not served raises a ValueError that names it, or is ignored.
        """
        return cls(**{**beam_call_fields(generation_config, unserved), **changes})
