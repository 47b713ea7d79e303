"""Engines over models with one table, with windows that have blocks of their own, or with states, as on a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

from support import state_engines, window_engines
from support.cpu_graphs import CpuCapturer, as_on_a_device
from support.state_engines import own_tokens, states_for
from support.state_models import make_state_model
from transformers import PreTrainedModel

from kvpage.serving import Engine

FULL, WINDOWS, STATES = ("llama",), ("gemma3", "gpt_oss"), ("mamba2", "qwen3_next", "lfm2")


@dataclass
class GroupKind:
    """A kind of model, and the answers of `model.generate`."""

    name: str

    def __post_init__(self) -> None:
        self._answers: dict[tuple[int, ...], list[int]] = {}

    @property
    def has_states(self) -> bool:
        return not self.has_windows and self.name not in FULL

    @property
    def has_windows(self) -> bool:
        return self.name in window_engines.KINDS

    @cached_property
    def model(self) -> PreTrainedModel:
        return make_state_model(self.name) if self.has_states else window_engines.make_window_model(self.name)

    @property
    def engines(self) -> ModuleType:
        return state_engines if self.has_states else window_engines

    def plain(self, **options: object) -> Engine:
        """An engine that computes each step by the model's Python, and waits for its tokens."""
        num_checkpoints = options.pop("num_checkpoints", None)
        if num_checkpoints is not None and self.has_states:
            options["states"] = states_for(self.engines.make_engine(self.model), *num_checkpoints)
        if self.name in FULL:
            options["num_window_blocks"] = None
        return self.engines.make_engine(self.model, **options)

    def on_device(
        self, *, graphs: bool = True, runs_ahead: bool = True, capturer: CpuCapturer | None = None, **options: object
    ) -> Engine:
        """The same as on a device."""
        engine = as_on_a_device(self.plain(**options), graphs=graphs, runs_ahead=runs_ahead, capturer=capturer)
        self.engines.poison(engine)
        return engine

    def answer(self, prompt: Sequence[int], num_tokens: int, stops: Sequence[int] = ()) -> list[int]:
        """The greedy answer, with the first of `stops` that is in it as its last token."""
        tokens = self._answers.get(tuple(prompt), [])
        if len(tokens) < num_tokens:
            tokens = self._answers[tuple(prompt)] = own_tokens(self.model, prompt, num_tokens)
        tokens = tokens[:num_tokens]
        ends = [place for place, token in enumerate(tokens) if token in stops]
        return tokens[: ends[0] + 1] if ends else tokens
