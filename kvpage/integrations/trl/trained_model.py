"""The model of a trainer as an engine may compute it: its own forward, in eval mode, over the weights as they are.

the trainer's model                           its stand-in
forward: patched by TRL and accelerate        the class's own forward
modules, parameters, buffers, hooks  ◄─────── the same dicts: changed weights and replaced layers count at once
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy

import torch
from transformers import PreTrainedModel

NUM_TRIED = 3  # tokens
PATCHES = ("forward", "_original_forward")
"""Attributes that accelerate and TRL patch on a model's instance. The patches call the model, never a view of it."""


def stand_in(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model over the same modules whose forward is that of its class.

    Only the outermost module is another object. So changes of layers and weights reach both. The outermost
    module's mode stays as it is now.

    Args:
        model: A model, whose forward may be patched.

    Returns:
        The stand-in.
    """
    stands_in: PreTrainedModel = copy(model)
    for name in PATCHES:
        vars(stands_in).pop(name, None)
    return stands_in


def check_stand_in(
    model: PreTrainedModel, stands_in: PreTrainedModel, autocast: AbstractContextManager[object]
) -> None:
    """Compute a few tokens by both.

    Args:
        model: The trainer's model, in eval mode.
        stands_in: Its stand-in.
        autocast: The trainer's autocast context.

    Raises:
        ValueError: The logits differ: a patch of the model's forward computes something else.
    """
    tokens = torch.arange(NUM_TRIED, device=model.device)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad(), autocast:
        logits, expected = (decoder(input_ids=tokens, use_cache=False).logits.float() for decoder in (stands_in, model))
    if not torch.equal(logits, expected):
        raise ValueError(
            f"forward of {type(model).__name__} must compute as its class does, the patched one gives other logits"
        )


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Keep all modules in eval mode within; afterwards each is as it was.

    Args:
        model: A model.
    """
    modes = [(module, module.training) for module in model.modules()]  # each before the modules inside it
    try:
        model.eval()
        yield
    finally:
        for module, is_training in modes:
            module.train(is_training)
