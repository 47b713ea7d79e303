"""ParamDefaults: the values of parameters that are None, by a model's generation config."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

from transformers import GenerationConfig, PreTrainedModel

from kvpage.serving.params.beam import BeamSearchParams
from kvpage.serving.params.generation_defaults import Unserved, beam_fields, check_served, sampling_fields
from kvpage.serving.params.sampling import DEFAULT_MAX_TOKENS, SamplingParams

GenerationDefaults = Literal["model", "served", "ignore"]
Params = TypeVar("Params", SamplingParams, BeamSearchParams)


@dataclass(frozen=True, slots=True)
class ParamDefaults:
    """The defaults of one model.

    sampling_call, beam_call: return the parameters of `model.generate` without arguments. Not every config has both.
    stated_sampling, stated_beams: the fields that the model's generation config states; the others are None.
    """

    sampling_call: Callable[[], SamplingParams]
    beam_call: Callable[[], BeamSearchParams]
    stated_sampling: SamplingParams
    stated_beams: BeamSearchParams

    @classmethod
    def of_model(cls, model: PreTrainedModel, choice: GenerationDefaults = "model") -> "ParamDefaults":
        """Read the generation config as it is now. Raises ValueError for fields that are not served.

        choice: "model" refuses such fields, "served" leaves them out, "ignore" takes transformers' own defaults.
        """
        if choice not in ("model", "served", "ignore"):
            raise ValueError(f"generation_config must be 'model', 'served' or 'ignore', got {choice!r}")
        model_config = getattr(model, "generation_config", None)
        # transformers does not annotate GenerationConfig.__init__.
        no_config = GenerationConfig()  # type: ignore[no-untyped-call, unused-ignore]
        config = no_config if model_config is None or choice == "ignore" else copy.deepcopy(model_config)
        unserved: Unserved = "ignore" if choice == "served" else "refuse"
        try:
            check_served(config) if unserved == "refuse" else None
        except ValueError as error:
            raise ValueError(f"{error}; generation_config='served' leaves that out") from error
        return cls(
            lambda: SamplingParams.from_generation_config(config, unserved),
            lambda: BeamSearchParams.from_generation_config(config, unserved),
            SamplingParams(**sampling_fields(config, unserved)),
            BeamSearchParams(**beam_fields(config, unserved)),
        )

    def sampling(self, params: SamplingParams | None, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
        """Fill in the fields that are None, and max_tokens. None: return the parameters of `model.generate`."""
        filled = self.sampling_call() if params is None else params
        return _filled(filled, self.stated_sampling, params is None, num_prompt_tokens, max_model_len)

    def beams(self, params: BeamSearchParams | None, num_prompt_tokens: int, max_model_len: int) -> BeamSearchParams:
        """Fill in the fields of a beam search, as `sampling` does."""
        filled = self.beam_call() if params is None else params
        return _filled(filled, self.stated_beams, params is None, num_prompt_tokens, max_model_len)


def _filled(params: Params, stated: Params, is_default: bool, num_prompt_tokens: int, max_model_len: int) -> Params:
    lacking: dict[str, Any] = {field.name: getattr(stated, field.name) for field in fields(stated)}
    lacking = {name: value for name, value in lacking.items() if value is not None and getattr(params, name) is None}
    lacking.pop("max_length", None)
    max_tokens = _asked_tokens(params, num_prompt_tokens)
    if max_tokens is None or is_default:
        most = max(max_model_len - num_prompt_tokens, 1)
        asked = max_tokens or _asked_tokens(stated, num_prompt_tokens)
        max_tokens = DEFAULT_MAX_TOKENS if asked is None else min(asked, most)
    lacking["max_tokens"] = max_tokens
    return params if lacking == {"max_tokens": params.max_tokens} else replace(params, **lacking)


def _asked_tokens(params: SamplingParams | BeamSearchParams, num_prompt_tokens: int) -> int | None:
    """Return the most tokens to generate, by max_tokens or max_length; None if neither is given."""
    if params.max_tokens is not None or params.max_length is None:
        return params.max_tokens
    if params.max_length <= num_prompt_tokens:
        raise ValueError(f"prompt must be shorter than max_length={params.max_length}, got {num_prompt_tokens} tokens")
    return params.max_length - num_prompt_tokens
