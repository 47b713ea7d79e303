"""PagedGRPOTrainer: TRL's GRPOTrainer with kvpage as its generator, turns with tools and environments included."""

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from trl import GRPOTrainer

from kvpage.integrations.trl.rollouts import PagedRollouts, check_text_only, check_trainer
from kvpage.serving import EngineConfig

TRIED = "1.16"
ASKED = {
    "_generate": ("self", "prompts"),
    "_generate_single_turn": ("self", "prompt_ids", "images", "multimodal_fields", "num_generations"),
    "_tokenize_prompts": ("self", "prompts"),
}
"""The methods of GRPOTrainer that are replaced or called, and the parameters that each begins with."""


def check_interface(trainer_class: Callable[..., object]) -> None:
    """Check that this TRL has the methods that are replaced.

    Args:
        trainer_class: GRPOTrainer.

    Raises:
        ImportError: It has not, with the method's name and the version.
    """
    for name, required in ASKED.items():
        method = getattr(trainer_class, name, None)
        parameters = () if method is None else tuple(inspect.signature(method).parameters)
        if parameters[: len(required)] != required:
            raise ImportError(
                f"GRPOTrainer.{name} must take ({', '.join(required)}), that of trl {version('trl')} takes "
                f"({', '.join(parameters)}); kvpage was tried with trl {TRIED}"
            )


check_interface(GRPOTrainer)


class PagedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """A GRPOTrainer whose completions come from an Engine over the model that it trains.

    Everything else is TRL's: rewards, masks, losses, tools, environments. A group's prompt is computed once. The turns
    of a conversation find the K and V of the turns before. K and V are forgotten after each batch of rollouts, before
    the weights change.

    Args:
        *args: As for GRPOTrainer.
        engine_config: The settings of the engine, which is made at the first batch of rollouts. None means
            `rollout_config(model)`.
        **kwargs: As for GRPOTrainer, but for `rollout_func`.

    Raises:
        ValueError: A setting leaves generation to something else, by name.
        TypeError: `engine_config` is of another type.
    """

    def __init__(self, *args: Any, engine_config: EngineConfig | None = None, **kwargs: Any) -> None:
        if kwargs.get("rollout_func") is not None:
            raise ValueError("rollout_func must be None for PagedGRPOTrainer, which generates by itself")
        self.rollouts = PagedRollouts(engine_config)
        super().__init__(*args, **kwargs)
        check_trainer(self)

    def _generate(self, prompts: list[Any]) -> Any:
        with self.rollouts.fixed_weights(self):
            return super()._generate(prompts)

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        check_text_only(images, multimodal_fields)
        return self.rollouts.complete(prompt_ids, self)
