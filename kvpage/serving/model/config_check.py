"""Check a model's config, before anything is computed: K and V must be all of its state."""

from transformers import PreTrainedModel

from kvpage.layout.config import ModelConfig

KNOWN_LAYERS = ("attention", "full_attention", "sliding_attention")


def check_config(model: PreTrainedModel) -> None:
    """Raise ValueError, with the reason, if the config says that blocks of K and V cannot hold the model's state."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"model must be a decoder only, {name} has an encoder")
    # transformers does not annotate get_output_embeddings.
    if not hasattr(model, "lm_head") and model.get_output_embeddings() is None:  # type: ignore[no-untyped-call, unused-ignore]
        raise ValueError(f"model must give logits over its vocabulary, {name} has no output embeddings")
    unknown = set(ModelConfig.from_hf(model.config).layer_types) - set(KNOWN_LAYERS)
    if unknown:
        raise ValueError(f"layers must be of {', '.join(KNOWN_LAYERS)}, {name} has {', '.join(sorted(unknown))}")
