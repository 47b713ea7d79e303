"""Check that the argument `model` is a loaded, uncompiled model of transformers, before anything else reads it."""

import torch


def check_model(model: object) -> None:
    """Raise TypeError for a model's name and for other types than models, ValueError for a compiled model."""
    if isinstance(model, str):
        raise TypeError(
            f"model must be a loaded PreTrainedModel, got the name {model!r}: load it, as "
            f"transformers.AutoModelForCausalLM.from_pretrained({model!r})"
        )
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "model must not be compiled, each batch would be compiled anew: give the model that torch.compile was "
            "given, it is compiled_model._orig_mod"
        )
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"model must be a PreTrainedModel of transformers, got {type(model).__name__}")
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise ValueError(
            f"model must not be compiled, each batch would be compiled anew: load this {type(model).__name__} again, "
            f"without a call of its compile()"
        )
