"""Check that the argument `model` is a loaded, uncompiled model of transformers, before anything else reads it."""

import torch

from kvpage.checks.shared_memory import bounds


def check_model(model: object) -> None:
    """Raise TypeError for a model's name, other types than models, and scripted modules in it.

    ValueError for a model that is compiled, or has a weight without memory.
    """
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
    _check_modules(model)
    _check_memory(model)


def _check_modules(model: torch.nn.Module) -> None:
    """Raise TypeError for modules whose code cannot be looked into."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"model must not hold a ScriptModule, {name} is a {type(module).__name__}: give the model without "
                f"torch.jit.script and torch.jit.trace"
            )


def _check_memory(model: torch.nn.Module) -> None:
    """Raise ValueError for weights whose memory was taken away: torch would read past its end."""
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        is_usual = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.layout is torch.strided
        if not is_usual or weight.is_nested or weight.device.type not in ("cpu", "cuda") or not weight.numel():
            continue
        begin, end = bounds(weight)
        needed = weight.storage_offset() * weight.element_size() + end - begin
        if weight.untyped_storage().nbytes() < needed:
            raise ValueError(
                f"model must have memory for its weights, {name} needs {needed} bytes and has "
                f"{weight.untyped_storage().nbytes()}: load it again, or undo its off-loading"
            )
