"""Each family with states, or with windows of their own, under each condition of serving: 32 greedy tokens in fp32."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from battery import Advance, Battery, Figures
from support import state_engines, window_engines
from support.condition_trial import Condition, ConditionTrial, trials_of
from support.conditions import STATES, WINDOWS
from support.state_models import SERVED, make_state_model
from support.window_engines import KINDS, make_window_model
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Served:
    """A sort of models. engines: the module of their engines."""

    kinds: tuple[str, ...]
    conditions: dict[str, Condition]
    make_model: Callable[[str], PreTrainedModel]
    engines: ModuleType

    def run(self, seed: int, count: int, advance: Advance) -> Figures:
        figures: Figures = {}
        for name, kind in trials_of(self.conditions, self.kinds, seed, count):
            trial = ConditionTrial(kind, seed, self.make_model(kind), self.engines)
            self.conditions[name](trial)
            figures[name] = figures.get(name, 0) + trial.num_compared
            advance(1)
        return figures

    def battery(self, name: str, short: int) -> Battery:
        """Return the battery. A round of the long form has each condition once, each with a family of its own."""
        longest = len(self.conditions)
        return Battery(name, "trials", short, len(self.kinds) * longest, self.run, longest=longest)


BATTERIES = [
    Served(SERVED, STATES, make_state_model, state_engines).battery("hybrids under each condition", 3),
    Served(KINDS, WINDOWS, make_window_model, window_engines).battery("windows under each condition", 2),
]
