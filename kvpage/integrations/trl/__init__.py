"""kvpage as the generator of TRL's GRPO: rollouts of the model that is being trained. It needs TRL.

    trainer = PagedGRPOTrainer(model, reward, ..., engine_config=config)             tools and environments included
    trainer = GRPOTrainer(model, reward, ..., rollout_func=PagedRollouts(config))    one turn a prompt
    policy = PolicyEngine(model, config); policy.sample(prompts, params)             a training loop of your own

PagedGRPOTrainer imports TRL when it is asked for; the others do not.
"""

from typing import TYPE_CHECKING, Any

from kvpage.integrations.trl.policy_engine import PolicyEngine, rollout_config
from kvpage.integrations.trl.rollouts import PagedRollouts

if TYPE_CHECKING:
    from kvpage.integrations.trl.trainer import PagedGRPOTrainer

__all__ = ["PagedGRPOTrainer", "PagedRollouts", "PolicyEngine", "rollout_config"]


def __getattr__(name: str) -> Any:
    if name == "PagedGRPOTrainer":
        from kvpage.integrations.trl.trainer import PagedGRPOTrainer

        return PagedGRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
