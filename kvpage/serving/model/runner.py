"""ModelRunner: computes packed sequences with a Hugging Face decoder whose K and V go into our blocks."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from kvpage.checks.interrupts import interruptible
from kvpage.serving.model.attention import StepMissing, current_step
from kvpage.serving.model.latent_attention import LatentPass
from kvpage.serving.model.step import Step
from kvpage.serving.model.view import ModelView


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Tokens of several sequences, one sequence after the other.

    token_ids: int32 [num_tokens]: of each sequence the positions [starts[i], ends[i]).
    wanted: int64, the rows of token_ids whose logits are asked for.
    """

    token_ids: npt.NDArray[np.int32]
    starts: list[int]
    ends: list[int]
    wanted: npt.NDArray[np.int64]

    def positions(self) -> npt.NDArray[np.int64]:
        """The position of each token in its own sequence."""
        starts, ends = np.array(self.starts, np.int64), np.array(self.ends, np.int64)
        counts = ends - starts
        rows_before = np.cumsum(counts) - counts
        return np.arange(len(self.token_ids)) + np.repeat(starts - rows_before, counts)


class ModelRunner:
    """Runs a view of `model`, which stays as it is, also within `forward`: see ModelView.

    ValueError if its attention does not go through AttentionInterface, or its forward takes no position_ids.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._view = ModelView(model)
        parameters = inspect.signature(model.forward).parameters
        if "position_ids" not in parameters:
            raise ValueError(f"forward must take position_ids, that of {type(model).__name__} does not")
        self._selects_logits = "logits_to_keep" in parameters
        self._passes_step = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    @property
    def view(self) -> PreTrainedModel:
        """The modules that compute; whatever is hung on them touches nobody else's forward."""
        return self._view.module

    def forward(self, packed: PackedTokens, step: Step) -> torch.Tensor:
        """Writes the tokens' K and V into the step's slots; the logits of the wanted rows: [len(wanted), vocab_size].

        ValueError if the model is in training mode, or a layer has not attended over blocks. What the model raises
        comes through; some K and V may be written.
        """
        self.check()
        wanted = torch.from_numpy(packed.wanted).to(self.model.device)
        inputs = {
            "input_ids": self._row(packed.token_ids),
            "position_ids": self._row(packed.positions()),
            "use_cache": False,
        }
        if self._selects_logits:
            inputs["logits_to_keep"] = wanted
        # no_grad, not inference_mode: what a model keeps of a forward (rotary tables) must stay usable for its owner.
        with torch.no_grad(), self._hooks(step):
            logits = self._call(inputs, step)[0]
        self._check_calls(step)
        return logits if self._selects_logits else logits[wanted]

    def check(self) -> None:
        """ValueError if the model is in training mode."""
        if self.model.training:
            raise ValueError(f"model must be in eval mode, {type(self.model).__name__} is in training mode")

    def _hooks(self, step: Step) -> AbstractContextManager[object]:
        """Those of a step that needs more than K and V as the attention function is given them."""
        if step.layout.backend == "mla":
            step.latents = step.latents or LatentPass(step)
            return step.latents.listening(self.view)
        return step.blend.hooks() if step.blend else nullcontext()

    def _call(self, inputs: dict[str, Any], step: Step) -> torch.Tensor:
        model = self.view
        if self._passes_step:
            try:
                with interruptible():
                    return model(**inputs, kvpage=step).logits
            except StepMissing:  # raised before anything is written, in the first forward: the check at load
                self._passes_step = False
        token = current_step.set(step)
        try:
            with interruptible():
                return model(**inputs).logits
        finally:
            current_step.reset(token)

    def _check_calls(self, step: Step) -> None:
        """A layer may have been replaced by one that attends in another way, over nothing that is cached."""
        called = {layer for layer, _ in step.calls}
        if called != step.caches.keys():
            name = type(self.model).__name__
            raise ValueError(
                f"layers {sorted(step.caches)} must each attend once over blocks, of {name} it was {sorted(called)}"
            )

    def _row(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64, copy=False)).unsqueeze(0).to(self.model.device)
