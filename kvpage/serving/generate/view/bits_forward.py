"""BitsForward: the forward of a view that `generate` calls, where a pool computes the same bits.

    view(input_ids, past_key_values=cache)  ─►  KVPageCache: checks, slots  ─►  ModelRunner, over the blocks  ─►  logits

The runner is that of an Engine: native layers, and a look at each of torch's operators. No layer of the caller's model
computes, and no K or V is copied out of blocks.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvpage.cache.cache_engine import CacheEngine
from kvpage.serving.generate.forward_hooks import ForwardListener, named_arguments
from kvpage.serving.generate.forward_inputs import Forward
from kvpage.serving.generate.states.row_states import RowPass
from kvpage.serving.generate.view.packed_rows import PackedRows
from kvpage.serving.model.hf_cache.argument import KV_ARGUMENTS, given_cache
from kvpage.serving.model.limits import vocab_size
from kvpage.serving.model.runner import ModelRunner

_READ = frozenset(
    ("input_ids", "attention_mask", "position_ids", "cache_position", *KV_ARGUMENTS, "use_cache", "return_dict")
)
"""Arguments that are checked elsewhere, or decide nothing. `logits_to_keep` is read, too."""
_CACHE_FIELD = next(name for name in KV_ARGUMENTS if name in CausalLMOutputWithPast.__dataclass_fields__)


class RowsOfView(ForwardListener, Protocol):
    """A cache, as the view sees it."""

    @property
    def runner(self) -> object | None:
        """What computes; None for a cache whose model computes."""

    @property
    def nums_pads(self) -> list[int] | None:
        """The padding of each row."""

    def begin_forward(self, arguments: Mapping[str, Any], call: FrameType) -> Forward:
        """Begin a forward, and return it."""


class BitsForward:
    """The forward of one view of one model. engine: of the pool's blocks."""

    def __init__(self, model: PreTrainedModel, runner: ModelRunner, engine: CacheEngine) -> None:
        self.__signature__ = inspect.signature(model.forward)
        self._model, self._runner, self._engine = model, runner, engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the new tokens of a cache's rows: CausalLMOutputWithPast, with logits of the last `logits_to_keep`.

        Raises ValueError for another cache than a KVPageCache of the pool, and for arguments besides tokens, a mask and
        positions; else as KVPageCache and ModelRunner do. Then nothing is changed.
        """
        arguments = named_arguments(self.__signature__, args, kwargs)
        cache, num_logits = self._cache(arguments), self._num_logits(arguments)
        _check_others(arguments)
        forward = cache.begin_forward(arguments, sys._getframe())
        try:
            logits = self._compute(forward, cache.nums_pads or [], num_logits)
            cache.finish_forward()
        finally:
            cache.end_forward()
        of_cache: dict[str, Any] = {_CACHE_FIELD: cache}
        output = CausalLMOutputWithPast(logits=logits, **of_cache)
        return output.to_tuple() if arguments.get("return_dict") is False else output

    def _cache(self, arguments: Mapping[str, Any]) -> RowsOfView:
        """Return the cache of a call. ValueError unless it is a KVPageCache of the pool."""
        cache: Any = given_cache(arguments)
        if getattr(cache, "runner", None) is not self._runner:
            raise ValueError(
                f"{' or '.join(KV_ARGUMENTS)} must be a KVPageCache of the pool, whose model has the same bits with it "
                f"alone, got {type(cache).__name__}"
            )
        rows: RowsOfView = cache
        return rows

    def _compute(self, forward: Forward, pads: Sequence[int], num_logits: int) -> torch.Tensor:
        assert forward.slots is not None, "without working memory, K and V go into blocks"
        assert not isinstance(forward.states, RowPass), "no mixer of the caller's computes"
        num_rows, num_tokens = forward.tokens.shape
        num_logits = min(num_logits or num_tokens, num_tokens)
        rows = PackedRows.of(forward.tokens, forward.start, pads, num_logits)
        with torch.autocast("cpu", enabled=False):  # an engine computes in the model's own dtype, too
            if rows.rows:
                logits = self._runner.forward(rows.packed, rows.step(self._engine, forward.slots, forward.states))
            else:
                logits = torch.zeros(0, vocab_size(self._model), dtype=self._model.dtype)
        forward.layers_left.clear()
        return rows.unpacked(logits, num_rows, num_logits)

    def _num_logits(self, arguments: Mapping[str, Any]) -> int:
        """Return of how many tokens logits are wanted; 0 for all, as models have it."""
        if "logits_to_keep" not in self.__signature__.parameters:
            return 0
        number = arguments.get("logits_to_keep", 0)
        if number is None:
            return 0
        if type(number) is not int or number < 0:
            raise ValueError(f"logits_to_keep must be a number of tokens with same_bits, got {number!r}")
        return number


def _check_others(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments that nothing here reads, such as those that ask for hidden states."""
    for name, value in arguments.items():
        if name not in _READ and name != "logits_to_keep" and value is not None and value is not False:
            raise ValueError(f"{name} must be left out with same_bits, got {type(value).__name__}")
