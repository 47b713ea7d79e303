"""Check a model's config, before anything is computed: K and V must be all that it keeps, or states in its cache."""

from transformers import PreTrainedModel

from kvpage.layout.config import ModelConfig

KNOWN_LAYERS = ("attention", "full_attention", "sliding_attention")
STATE_LAYERS = ("linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding", "moe", "mlp")
"""Of models that keep states: with a state, with both, or with nothing."""


def check_config(model: PreTrainedModel, takes_states: bool = False) -> None:
    """Raise ValueError, with the reason, if the config says that blocks of K and V cannot hold the model's state.

    takes_states: whether there are state slots, too.
    """
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"model must be a decoder only, {name} has an encoder")
    # transformers does not annotate get_output_embeddings.
    if not hasattr(model, "lm_head") and model.get_output_embeddings() is None:  # type: ignore[no-untyped-call, unused-ignore]
        raise ValueError(f"model must give logits over its vocabulary, {name} has no output embeddings")
    known = (*KNOWN_LAYERS, *STATE_LAYERS) if takes_states else KNOWN_LAYERS
    unknown = set(ModelConfig.from_hf(model.config).layer_types) - set(known)
    if unknown:
        raise ValueError(f"layers must be of {', '.join(known)}, {name} has {', '.join(sorted(unknown))}")


def check_divides(name: str, num_all: int, size: int) -> None:
    """Raise ValueError where a rank would have a part of a KV head: there the model's own forward fails.

    name: of the model. num_all: the heads of all ranks.
    """
    if num_all % size:
        raise ValueError(f"tensor_parallel_size must divide the {num_all} KV heads of {name}, got {size}")
