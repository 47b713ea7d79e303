"""ModelRunner: compute packed sequences with a Hugging Face decoder, whose K and V go into blocks."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvpage.checks.interrupts import interruptible
from kvpage.serving.model.attention import IMPLEMENTATION, UNCOMPILED, StepMissing, current_step
from kvpage.serving.model.latents.attention import LatentPass
from kvpage.serving.model.native.bits.row_bits import RowBits
from kvpage.serving.model.native.layers import ViewLayers
from kvpage.serving.model.states.mixer_forward import view_forwards
from kvpage.serving.model.states.model_states import ModelStates
from kvpage.serving.model.step import ModelInputs, PackedTokens, Step
from kvpage.serving.model.view import ModelView
from kvpage.serving.weights.adapters.adapted_linear import AdaptedPass
from kvpage.serving.weights.adapters.adapter import Adapter

NOTHING = nullcontext()
"""A context that does nothing, for all that need one."""


class ModelRunner:
    """Run a view of `model`. The model does not change, not even within `forward`: see ModelView.

    native: see ModelView. compiles: call torch.compile of the view.
    holds_interrupts: whether Ctrl-C waits for a forward's end. Other ranks compute it, too.
    states: what the model keeps besides K and V; each step then needs `Step.states`.
    row_bits: has rows computed with the same bits whatever is computed beside them; None to compute as it comes.
    Raises ValueError if its attention does not go through AttentionInterface, or its forward takes no position_ids.
    A model without attention needs neither.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        native: ViewLayers | None = None,
        *,
        compiles: bool = False,
        holds_interrupts: bool = False,
        states: ModelStates | None = None,
        row_bits: RowBits | None = None,
    ) -> None:
        self.model = model
        self._holds_interrupts = holds_interrupts
        self.state_layout = None if states is None else states.layout
        forwards = {} if states is None else view_forwards(states.mixers, row_bits)
        self._view = ModelView(model, native, UNCOMPILED if compiles else IMPLEMENTATION, forwards)
        self._has_adapters = False
        self._compiled: Any = torch.compile(self._view.module, dynamic=True) if compiles else None
        self._threads = None if native is None else native.threads
        if row_bits is not None:
            self._threads = row_bits.threads
        self._row_bits = row_bits
        self._no_grad = torch.no_grad()
        parameters = inspect.signature(model.forward).parameters
        self._gives_positions = "position_ids" in parameters
        attends = states is None or states.kv_shape is not None
        if attends and not self._gives_positions:
            raise ValueError(f"forward must take position_ids, that of {type(model).__name__} does not")
        self._selects_logits = "logits_to_keep" in parameters
        # Compiled code would depend on all of the step: it reaches attention on another way.
        # Mixers hand keywords on to functions of their own, which would not know it.
        self._passes_step = (
            not compiles
            and states is None
            and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        )

    @property
    def same_bits(self) -> bool:
        """Whether a row's bits do not depend on what is computed beside it."""
        return self._row_bits is not None

    def know_operators(self) -> None:
        """Leave `row_bits` out of forwards from now on, where it has replaced nothing so far."""
        if self._row_bits is not None:
            self._row_bits.know(self.view_version)

    @property
    def view(self) -> PreTrainedModel:
        """The modules that compute. Patches of these do not affect the model's own forward."""
        view: PreTrainedModel = self._view.module
        return view

    @property
    def adapted(self) -> AdaptedPass:
        """Which rows of the next forward have which adapters."""
        return self._view.adapted

    @property
    def has_adapters(self) -> bool:
        """Whether any row may have one."""
        return self._has_adapters

    def use_adapters(self, adapters: Sequence[Adapter]) -> None:
        """Let rows have these adapters from now on. ValueError for layers that are no nn.Linear."""
        self._view.use_adapters(adapters)
        self._has_adapters = bool(adapters)

    @property
    def view_version(self) -> int:
        """A number that grows whenever modules of the model were replaced."""
        return self._view.version

    def forward(self, tokens: PackedTokens | ModelInputs, step: Step) -> torch.Tensor:
        """Write the tokens' K and V into the step's slots, and return the wanted logits: [len(wanted), vocab_size].

        tokens: of the host, or inputs on the model's device, beside which nothing is copied from the host.

        Raises ValueError if the model is in training mode, or a layer has not attended over blocks. Errors of the model
        are raised as they are. After an error, some K and V may be written.
        """
        inputs = step.inputs if isinstance(tokens, PackedTokens) else tokens
        if inputs is None:
            assert isinstance(tokens, PackedTokens), "inputs on the device are there"
            inputs = ModelInputs.of(tokens, step.slot_mapping.device)
        self.check()
        self._check_states(step)
        if step.layout.backend == "mla" and step.latents is None:
            step = replace(step, latents=LatentPass(step, all_in_place=self.same_bits))
        step.lift(self._threads)
        if self.same_bits:
            step.sequences.fix_order()
        module = self.view  # it follows modules that were replaced
        # no_grad, not inference_mode: tensors that a model keeps of a forward (rotary tables) must stay usable later.
        try:
            with self._no_grad, self._hooks(step), self._limited(), self._around(step):
                model = module if self._compiled is None else self._compiled
                logits: torch.Tensor = model(**self._arguments(step, inputs)).logits[0]
        except StepMissing:  # raised before anything is written, in the first forward: the check at load
            if not self._passes_step:
                raise
            self._passes_step = False
            return self.forward(inputs, step)
        self._check_calls(step)
        if step.states is not None:
            step.states.check_done()
        return logits if inputs.wanted is None or self._selects_logits else logits[inputs.wanted]

    def _limited(self) -> AbstractContextManager[object]:
        """Return the limits of torch's threads, and of its operators, that the view and `row_bits` need."""
        bits = self._row_bits
        return self._view.one_thread_in_torch() if bits is None else self._with_row_bits(bits)

    @contextmanager
    def _with_row_bits(self, bits: RowBits) -> Iterator[None]:
        with bits.threads.limited(), bits if bits.is_needed(self._view.version) else NOTHING:
            yield

    def _arguments(self, step: Step, inputs: ModelInputs) -> dict[str, Any]:
        """Return the model's arguments."""
        arguments: dict[str, Any] = {"input_ids": inputs.token_ids, "use_cache": False}
        if self._gives_positions:
            arguments["position_ids"] = inputs.positions
        if self._selects_logits:
            arguments["logits_to_keep"] = 0 if inputs.wanted is None else inputs.wanted  # 0: all, without a copy
        if self._passes_step:
            arguments["kvpage"] = step
        return arguments

    def _around(self, step: Step) -> AbstractContextManager[object]:
        """Have attention know the step, where it is no argument, and let Ctrl-C come through, where no rank waits."""
        if not self._passes_step:
            return self._known_step(step)
        return NOTHING if self._holds_interrupts else interruptible()

    @contextmanager
    def _known_step(self, step: Step) -> Iterator[None]:
        token = current_step.set(step)
        try:
            with NOTHING if self._holds_interrupts else interruptible():
                yield
        finally:
            current_step.reset(token)

    def check(self) -> None:
        """Raise ValueError if the model is in training mode."""
        if self.model.training:
            raise ValueError(f"model must be in eval mode, {type(self.model).__name__} is in training mode")

    def _check_states(self, step: Step) -> None:
        if (step.states is not None) != (self.state_layout is not None):
            rule = "must not" if self.state_layout is None else "must"
            raise ValueError(f"step {rule} have states for {type(self.model).__name__}")
        if step.states is not None:
            step.states.check(step.query_lens, step.seq_lens)

    def _hooks(self, step: Step) -> AbstractContextManager[object]:
        """Return the patches of a step that needs more than the arguments of the attention function."""
        if step.latents is not None:
            return step.latents.listening(self.view)
        return step.blend.hooks() if step.blend else NOTHING

    def _check_calls(self, step: Step) -> None:
        """Raise ValueError for a layer that has not attended over blocks: it was replaced since the check at load."""
        called = {layer for layer, _ in step.calls}
        if called != step.caches.keys():
            name = type(self.model).__name__
            raise ValueError(
                f"layers {sorted(step.caches)} must each attend once over blocks, of {name} it was {sorted(called)}"
            )
