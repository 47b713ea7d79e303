"""BeamSearchParams: the rules of one beam search, and its end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvpage.checks import fields as checks
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
    """The rules of one beam search, frozen and validated. Names and meanings are those of GenerationConfig.

    LogitsParams documents the other fields: they change the log-probabilities. None takes the default of the model's
    generation config; each field names its default where that has none.

    Args:
        num_beams: the number of continuations that are followed at once.
        max_tokens: the most tokens that are generated. Default 16.
        num_return_sequences: the number of continuations that are returned, the best first. At most num_beams.
        length_penalty: a finished beam is ranked by score / (generated tokens ** length_penalty). Default 1.
        early_stopping: True ends the search at the num_beams-th finished beam. False, the default, ends it when the
            best running beam at its length is no better than the worst finished one. "never" ends it when no running
            beam could become better at any length.
        stop_token_ids: as in SamplingParams.
        ignore_eos: as in SamplingParams.

    Raises:
        ValueError: for a value that a field does not take, with the field's name.
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
        """Make the parameters by which `model.generate` searches with this GenerationConfig and no other arguments.

        Args:
            generation_config: transformers' GenerationConfig.
            unserved: "refuse" raises for fields that kvpage does not serve; "ignore" leaves them out.
            changes: fields that replace those of the config.

        Returns:
            The parameters.

        Raises:
            ValueError: for a field that is not served, or a value that a field does not take, with the field's name.
        """
        return cls(**{**beam_call_fields(generation_config, unserved), **changes})
