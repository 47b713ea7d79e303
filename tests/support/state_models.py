"""Tiny models whose layers keep states, one of each family, with random weights."""

import pytest
import torch
import transformers as tf
from support.family_configs import small_fields
from support.models import spread_sinks
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvpage.serving.model.states.model_states import are_states_served

NAMED = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lara_mini",
    "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "zamba", "zamba2", "zaya",
)  # fmt: skip
"""Types that are served, of any version of transformers."""
ARE_CACHED = are_states_served()
"""Whether models whose layers keep states are served. With an early transformers they are refused."""
FIRST = {"olmo_hybrid": "5.15", "qwen3_5": "5.8", "qwen3_5_moe": "5.8", "recurrent_gemma": "5.21"}
"""Versions from which on these are served: before, their caches are their own, or transformers cannot make them."""
LATE = tuple(kind for kind, first in FIRST.items() if not are_states_served(first))
NOT_CACHED = () if are_states_served("5.15") or not are_states_served("5.14") else ("nemotron_h",)
"""Those that transformers itself makes no cache for: 5.14 knows no layers of `mlp`."""
HIDDEN = ("nemotron_h", "zamba2") if are_states_served("5.15") and not are_states_served("5.16") else ()
"""Those that are refused because a decorator hides the code of their mixers, whose steps are not their scans."""
SERVED = tuple(
    kind for kind in NAMED if kind in CONFIG_MAPPING and ARE_CACHED and kind not in (*LATE, *NOT_CACHED, *HIDDEN)
)
"""Those of this version."""
STEPWISE = {"mamba", "falcon_mamba", "jamba", "zamba"}
"""Those whose mixers read a state only where they compute one token."""
SCANNED = STEPWISE
"""Those of them whose scans kvpage begins with a state, so that several tokens are one call."""
APART = {"nemotron_h", "zamba2"} if are_states_served("5.15") else set[str]()
"""Those whose mixers compute one token after a state by another rule than a prompt: they share no answers."""
INKLING = ("inkling_text", "inkling2_text", "inkling2_loop_text") if are_states_served("5.18") else ()
REFUSED = tuple(kind for kind in INKLING if kind in CONFIG_MAPPING)
"""Types with states in their cache, that are refused because of their attention."""
FIELDS: dict[str, dict[str, object]] = {
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "zamba": {"use_mamba_kernels": False},  # before transformers 5.15
}
"""By type: fields beside those of all families."""


def make_state_model(kind: str, weight_std: float = 0.1) -> tf.PreTrainedModel:
    """A tiny random model in fp32 and eval mode."""
    if not ARE_CACHED or kind in (*LATE, *NOT_CACHED, *HIDDEN) or kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {tf.__version__} keeps no states of {kind} as they are served")
    config_class = CONFIG_MAPPING[kind]
    config = config_class(**{**small_fields(config_class, kind), **FIELDS.get(kind, {})})
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=weight_std)
    spread_sinks(model)
    return model
