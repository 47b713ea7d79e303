"""bits_view: a model to call `generate` on, whose forward is a runner's. The caller's model does not change."""

from collections import OrderedDict

from transformers import PreTrainedModel

from kvpage.cache.cache_engine import CacheEngine
from kvpage.serving.generate.view.bits_forward import BitsForward
from kvpage.serving.model.runner import ModelRunner

_CALLED = "_forward_", "_backward_"
"""How the names of a module's dicts of hooks begin that a call runs."""


def bits_view(runner: ModelRunner, engine: CacheEngine) -> PreTrainedModel:
    """Return a copy of the runner's model with the same weights and configs, that computes over blocks of `engine`.

    Hooks of the model are called by the runner. The copy has none yet.
    """
    model = runner.model
    view: PreTrainedModel = type(model).__new__(type(model))
    attributes = vars(view)
    attributes.update(vars(model))
    attributes.update((name, OrderedDict()) for name in vars(model) if name.startswith(_CALLED) and "hooks" in name)
    attributes.update(_compiled_call_impl=None, forward=BitsForward(model, runner, engine))
    return view
