"""PagedRollouts: the completions of a GRPOTrainer, computed by a PolicyEngine over the trainer's own model.

GRPOTrainer ─► rollout_func(prompts, trainer) ─► PolicyEngine.sample ─► prompt_ids, completion_ids, logprobs
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from kvpage.checks.values import check_flag
from kvpage.integrations.trl.policy_engine import PolicyEngine
from kvpage.serving import EngineConfig, Sample, SamplingParams

TOKEN_FIELDS = ("token_type_ids", "attention_mask")
"""Outputs of tokenizers of text besides token ids. No decoder that is served reads them."""


class PagedRollouts:
    """The rollouts of one trainer. Pass it to `GRPOTrainer` as `rollout_func`.

    Completions end, and are cut, as in TRL's plain generation. Every call begins with an empty cache, so that no
    K and V of earlier weights are read.

    Args:
        config: The settings of the engine, which is made at the first call. None means `rollout_config(model)`.
        returns_logprobs: Also return the log-probability of each token, by the model's own logits. TRL's plain
            generation returns none, and GRPO without vLLM reads none.

    Raises:
        TypeError: An argument is of another type.
    """

    def __init__(self, config: EngineConfig | None = None, *, returns_logprobs: bool = False) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise TypeError(f"config must be an EngineConfig or None, got {type(config).__name__}")
        check_flag("returns_logprobs", returns_logprobs)
        self._config, self._returns_logprobs = config, returns_logprobs
        self.policy: PolicyEngine | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return a completion for each prompt, as TRL asks of a `rollout_func`.

        Args:
            prompts: Texts or conversations. The trainer repeats a prompt for each completion of its group.
            trainer: The GRPOTrainer.

        Returns:
            `prompt_ids`, `completion_ids` and `logprobs`: a list for each prompt; `logprobs` may be None.

        Raises:
            ValueError: The trainer asks for a field that is not served, by name. It has tools: TRL would compute later
                turns by itself, so that PagedGRPOTrainer is needed.
            RuntimeError: A completion could not be computed, with the reason.
        """
        if getattr(trainer, "tools", None):
            raise ValueError("rollout_func must be None for a trainer with tools: use PagedGRPOTrainer")
        prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
        check_text_only(images, fields)
        completion_ids, logprobs = self.complete(prompt_ids, trainer)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    def complete(
        self, prompt_ids: Sequence[Sequence[int]], trainer: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Return a completion for each prompt, and log-probabilities if these were asked for.

        Args:
            prompt_ids: Token ids of each prompt.
            trainer: The GRPOTrainer.

        Returns:
            Token ids of each completion, the end-of-sequence token included; and a number for each token, or None.

        Raises:
            ValueError, RuntimeError: As for a call of the object.
        """
        params = completion_params(trainer, self._returns_logprobs)
        samples = self._policy(trainer).sample(prompt_ids, params)
        logprobs = [_logprobs(sample) for sample in samples] if self._returns_logprobs else None
        return [sample.token_ids for sample in samples], logprobs

    @contextmanager
    def fixed_weights(self, trainer: Any) -> Iterator[None]:
        """Let completions within find each other's prefixes; see `PolicyEngine.fixed_weights`.

        Args:
            trainer: The GRPOTrainer.
        """
        with self._policy(trainer).fixed_weights():
            yield

    def _policy(self, trainer: Any) -> PolicyEngine:
        """Return the engine over the trainer's model, which is made anew for another model."""
        check_trainer(trainer)
        model = model_of(trainer)
        if self.policy is None or self.policy.model is not model:
            self.policy = None  # its cache is freed first
            self.policy = PolicyEngine(model, self._config, trainer.accelerator.autocast)
        return self.policy


def completion_params(trainer: Any, returns_logprobs: bool) -> SamplingParams:
    """Return the rules of the trainer's plain generation.

    Args:
        trainer: The GRPOTrainer.
        returns_logprobs: Whether log-probabilities are asked for.

    Returns:
        The rules.

    Raises:
        ValueError: A field is not served, by name. Log-probabilities are asked for at another temperature than 1.
    """
    if returns_logprobs and trainer.temperature != 1:
        raise ValueError(
            f"temperature must be 1 for log-probabilities of the model's logits, got {trainer.temperature}"
        )
    config = trainer.generation_config
    eos = config.eos_token_id
    ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    stop_token_ids = tuple(dict.fromkeys([*trainer.eos_token_ids, *ends]))
    logprobs = 0 if returns_logprobs else None
    return SamplingParams.from_generation_config(config, stop_token_ids=stop_token_ids, logprobs=logprobs)


def model_of(trainer: Any) -> PreTrainedModel:
    """Return the decoder that the trainer trains, without the wrappers of accelerate and of adapters.

    Args:
        trainer: The GRPOTrainer.

    Returns:
        The model.

    Raises:
        ValueError: Its adapter is a learned prompt, which is no part of the decoder.
    """
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    if not hasattr(model, "peft_config"):
        return model  # type: ignore[no-any-return]
    learned = [name for name, adapter in model.peft_config.items() if getattr(adapter, "is_prompt_learning", False)]
    if learned:
        raise ValueError(f"adapters must change layers, got {', '.join(learned)}, which learns a prompt")
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[no-any-return]


def check_trainer(trainer: Any) -> None:
    """Check that the trainer leaves generation to this process.

    Args:
        trainer: The GRPOTrainer.

    Raises:
        ValueError: It has another generator, or its weights are split over processes; with the setting's name.
    """
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        if getattr(trainer, name, False):
            raise ValueError(f"{name} must be False with kvpage as the generator, got True")
    if getattr(trainer, "is_fsdp_enabled", False):
        raise ValueError("fsdp must be off with kvpage as the generator: each process needs all weights")
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        raise ValueError("DeepSpeed's zero_stage must be less than 3 with kvpage as the generator, got 3")


def check_text_only(images: Any, fields: dict[str, Any]) -> None:
    """Check that prompts are text.

    Args:
        images: The images of the prompts, or None.
        fields: The tokenizer's outputs besides token ids, by name.

    Raises:
        ValueError: They are not, with the names of the fields.
    """
    others = [name for name in fields if name not in TOKEN_FIELDS]
    if images or others:
        raise ValueError(f"prompts must be text alone, got {', '.join([*others, *(['images'] if images else [])])}")


def _logprobs(sample: Sample) -> list[float]:
    return [token.logprob for token in sample.logprobs or ()]
