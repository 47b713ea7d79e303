"""Read a GenerationConfig into the fields of SamplingParams and BeamSearchParams.

transformers 4 fills in its own defaults, and transformers 5 leaves them None. Both are read alike: as not stated.
"""

from collections.abc import Callable
from typing import Any, Literal

Unserved = Literal["refuse", "ignore"]
Fields = dict[str, Any]

LIBRARY_MAX_LENGTH, LIBRARY_TOP_K = 20, 50
"""The defaults of transformers 4, which no model has to have stated: 20 tokens; top_k of 50 for draws."""

SAME_NAMES = (
    "max_length", "min_length", "repetition_penalty", "sequence_bias", "no_repeat_ngram_size", "bad_words_ids",
    "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits", "watermarking_config",
)  # fmt: skip
WARPERS = ("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
BEAMS = ("num_return_sequences", "length_penalty", "early_stopping")


def _is_more_than(least: float) -> Callable[[Any], bool]:
    return lambda value: value > least


UNSERVED: dict[str, Callable[[Any], bool]] = {
    "guidance_scale": lambda value: value != 1,
    "encoder_repetition_penalty": lambda value: value != 1,
    "encoder_no_repeat_ngram_size": _is_more_than(0),
    "penalty_alpha": _is_more_than(0),
    "dola_layers": lambda value: True,
    "num_beam_groups": _is_more_than(1),
    "diversity_penalty": _is_more_than(0),
    "constraints": bool,
    "force_words_ids": bool,
    "stop_strings": bool,
    "token_healing": bool,
    "max_time": lambda value: True,
    "watermarking_config": lambda value: not hasattr(value, "greenlist_ratio"),
}
"""Fields that are not served and change the generated tokens, each with the values that do. Speed is no change."""


def unserved_fields(config: Any) -> list[str]:
    """Return the fields of a GenerationConfig that kvpage does not serve, as "guidance_scale=1.5"."""
    asked = {name: getattr(config, name, None) for name in UNSERVED}
    return [f"{name}={value!r}" for name, value in asked.items() if value is not None and UNSERVED[name](value)]


def check_served(config: Any) -> None:
    """Raise ValueError, with their names, for fields that kvpage does not serve."""
    if asked := unserved_fields(config):
        raise ValueError(f"generation_config must ask for served features only, it asks for {', '.join(asked)}")


def logits_fields(config: Any, unserved: Unserved) -> Fields:
    """Return the fields of LogitsParams that the config states, and max_tokens."""
    if unserved not in ("refuse", "ignore"):
        raise ValueError(f"unserved must be 'refuse' or 'ignore', got {unserved!r}")
    if unserved == "refuse":
        check_served(config)
    stated = {name: getattr(config, name, None) for name in SAME_NAMES}
    stated["max_tokens"], stated["min_tokens"] = config.max_new_tokens, config.min_new_tokens
    if stated["max_tokens"] is not None or stated["max_length"] == LIBRARY_MAX_LENGTH:
        stated["max_length"] = None
    if stated["min_tokens"] is not None:
        stated["min_length"] = None
    if UNSERVED["watermarking_config"](stated["watermarking_config"]):
        stated["watermarking_config"] = None
    return _stated(stated)


def sampling_fields(config: Any, unserved: Unserved) -> Fields:
    """Return the fields of SamplingParams that the config states. Without do_sample it states a temperature of 0."""
    samples = config.do_sample is True
    temperature = 1.0 if config.temperature is None else config.temperature
    stated: Fields = {name: getattr(config, name, None) for name in WARPERS}
    stated["temperature"] = temperature if samples else 0.0
    stated["top_k"] = config.top_k
    if config.top_k is None or config.top_k == LIBRARY_TOP_K:
        stated["top_k"] = LIBRARY_TOP_K if samples else None
    top_p = config.top_p
    if top_p is not None:
        stated["top_p"] = min(max(float(top_p), 1e-9), 1.0)  # 0 leaves the likeliest, as in transformers
    for name in ("epsilon_cutoff", "eta_cutoff"):
        if stated[name] is not None and not 0 < stated[name] < 1:
            stated[name] = None  # as in transformers
    return _stated(stated) | logits_fields(config, unserved)


def call_fields(config: Any, unserved: Unserved) -> Fields:
    """Return SamplingParams' fields of `model.generate` without arguments. ValueError for a config with beams."""
    num_beams: int = config.num_beams or 1
    if num_beams > 1 and unserved == "refuse":
        raise ValueError(f"generation_config must ask for one beam here, it asks for num_beams={num_beams}")
    stated = sampling_fields(config, unserved)
    if "max_length" not in stated:
        stated.setdefault("max_tokens", LIBRARY_MAX_LENGTH)
    return stated | {"n": config.num_return_sequences or 1}


def beam_fields(config: Any, unserved: Unserved) -> Fields:
    """Return the fields of BeamSearchParams that the config states, without the number of beams."""
    return _stated({name: getattr(config, name, None) for name in BEAMS[1:]}) | logits_fields(config, unserved)


def beam_call_fields(config: Any, unserved: Unserved) -> Fields:
    """Return BeamSearchParams' fields of `model.generate` without arguments. ValueError for a config that samples."""
    if config.do_sample is True and unserved == "refuse":
        raise ValueError("generation_config must not draw tokens in a beam search, it asks for do_sample=True")
    stated = beam_fields(config, unserved)
    if "max_length" not in stated:
        stated.setdefault("max_tokens", LIBRARY_MAX_LENGTH)
    counts = {"num_beams": config.num_beams or 1, "num_return_sequences": config.num_return_sequences or 1}
    return stated | counts


def _stated(config_fields: Fields) -> Fields:
    return {name: value for name, value in config_fields.items() if value is not None}
