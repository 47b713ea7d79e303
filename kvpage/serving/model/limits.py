"""Read a model's limits from its configs: vocabulary, end-of-sequence tokens, number of positions."""

import sys
from typing import Any

import torch
from transformers import PreTrainedModel

CHANGING_ROPE = ("dynamic", "longrope")
"""The kinds of rotary embeddings whose frequencies change with the length."""


def vocab_size(model: PreTrainedModel) -> int:
    """Return how many token ids the model can look up."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that end a sequence in `model.generate`, by the generation config."""
    generation = getattr(model, "generation_config", None)
    eos = generation.eos_token_id if generation is not None else model.config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, (list, tuple)) else frozenset([eos])


def max_model_len(model: PreTrainedModel) -> int:
    """Return the most tokens of a sequence."""
    text = model.config.get_text_config(decoder=True)
    return min(getattr(text, "max_position_embeddings", None) or sys.maxsize, constant_rope_len(model))


def constant_rope_len(model: PreTrainedModel) -> int:
    """Return the length up to which a token's K depends on its position alone.

    The frequencies of some rotary embeddings ("dynamic", "longrope") change at a length. Beyond it, a token's K would
    depend on the other sequences of the batch, and blocks could not be shared.
    """
    text = model.config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None) or sys.maxsize
    lengths = [
        parameters.get("original_max_position_embeddings")
        or getattr(text, "original_max_position_embeddings", None)
        or limit
        for parameters in _rope_parameters(text)
        if parameters.get("rope_type", parameters.get("type")) in CHANGING_ROPE
    ]
    return min(lengths, default=sys.maxsize)


def limited_model_len(model: PreTrainedModel, asked: int | None) -> int:
    """Return `asked`, or the most that the model allows for None. Raises ValueError for more than that."""
    allowed = max_model_len(model)
    if asked is None:
        return allowed
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= allowed:
        why = rope_limit(model, allowed + 1)
        raise ValueError(f"max_model_len must be in [1, {allowed}] for this model, got {asked!r}{why}")
    return asked


def rope_limit(model: PreTrainedModel, num_tokens: int) -> str:
    """Return the end of an error about num_tokens: the reason in the rotary embeddings. Empty if there is none."""
    limit = constant_rope_len(model)
    if num_tokens <= limit:
        return ""
    kinds = " and ".join(sorted(rope_types(model) & set(CHANGING_ROPE)))
    return (
        f"; its rotary embedding ({kinds}) has other frequencies beyond {limit} tokens, with which cached K would be "
        f"wrong: longer sequences need model.generate with a cache of transformers' own"
    )


def rope_types(model: PreTrainedModel) -> set[str]:
    """Return the kinds of rotary embeddings that the config names: "default", "llama3", "yarn", ..."""
    parameters = _rope_parameters(model.config.get_text_config(decoder=True))
    return {kind for rope in parameters if (kind := rope.get("rope_type", rope.get("type")))}


def _rope_parameters(text: Any) -> list[dict[str, Any]]:
    """Return the parameters for all layers, or for each layer type. transformers 4 and 5 name them differently."""
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return [parameters, *(nested for nested in parameters.values() if isinstance(nested, dict))]
