"""GRPO by TRL itself, over a tiny random model. `tests/integrations/run.sh trl` runs this; elsewhere it skips."""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_folder import make_model_folder

if importlib.util.find_spec("trl") is None:
    pytest.skip("needs trl: tests/integrations/run.sh trl", allow_module_level=True)

from datasets import Dataset
from support import fake_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from kvpage import CacheConfig
from kvpage.integrations.trl import PagedGRPOTrainer, PagedRollouts
from kvpage.integrations.trl.trainer import check_interface
from kvpage.serving import Engine, EngineConfig, WeightsChanged
from kvpage.serving.weights.watch import WeightWatch

pytestmark = pytest.mark.routers
ENGINE = EngineConfig(CacheConfig(block_size=16, num_gpu_blocks=512))
PROMPTS = ["the quick brown fox", "It's what they don't say, isn't it?", "def f(x):", "0123456789 true"]
GREEDY = {"do_sample": False, "temperature": None}
SETTINGS = {
    "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 12, "use_cpu": True, "bf16": False,
    "max_steps": 4, "report_to": [], "logging_steps": 1, "learning_rate": 3e-2, "lr_scheduler_type": "constant",
    "shuffle_dataset": False, "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip
TIMES = ("step_time", "runtime", "per_second")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tiny", max_model_len=256)


class Rewards:
    """Rewards by the place in the batch: even equal completions of a group differ in them. Keeps the completions."""

    __name__ = "by_place"

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        self.seen.append(completion_ids)
        return [float(place % 2 + ids[0] % 7) for place, ids in enumerate(completion_ids)]


def make_trainer(
    make: Callable[..., GRPOTrainer], folder: Path, tmp_path: Path, rewards: Any, prompts: Any = None, **fields: Any
) -> GRPOTrainer:
    special = {
        name: fields.pop(name) for name in ("engine_config", "rollout_func", "peft_config", "tools") if name in fields
    }
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return make(
        model=model,
        reward_funcs=rewards,
        args=GRPOConfig(output_dir=str(tmp_path), **{**SETTINGS, **fields}),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS if prompts is None else prompts}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        **special,
    )


def trained(
    make: Callable[..., GRPOTrainer], *given: Any, **fields: Any
) -> tuple[Rewards, list[dict[str, float]], Any]:
    """Train to the end. Returns the rewards with all completions, the logged numbers, and the trainer.

    Numbers leave out times. A number that TRL could not compute is -1.
    """
    rewards = Rewards()
    trainer = make_trainer(make, *given, rewards, **fields)
    trainer.train()
    logged = [
        {
            name: -1.0 if value is None else value
            for name, value in line.items()
            if not any(word in name for word in TIMES)
        }
        for line in trainer.state.log_history
    ]
    return rewards, logged, trainer


def assert_same(plain: Any, paged: Any) -> None:
    assert paged[0].seen == plain[0].seen
    for found, expected in zip(paged[1], plain[1], strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    for found, expected in zip(paged[2].model.parameters(), plain[2].model.parameters(), strict=True):
        assert torch.allclose(found, expected, atol=1e-4)


def end_token(folder: Path, tmp_path: Path) -> int:
    """Return a token that some greedy completions have, and others have not."""
    rewards, _, _ = trained(GRPOTrainer, folder, tmp_path, generation_kwargs=GREEDY, max_steps=1)
    first, *others = [ids for batch in rewards.seen for ids in batch]
    return next(token for token in first[1:] if any(token not in ids for ids in others))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gradient_checkpointing": True, "num_iterations": 2, "steps_per_generation": 2, "max_steps": 12},
        {"beta": 0.1, "num_generations": 4},
        {"repetition_penalty": 1.3},
    ],
    ids=["plain", "several iterations", "with a reference model", "with a penalty"],
)
def test_completions_rewards_and_weights_are_those_of_the_plain_path_at_each_step(folder, tmp_path, fields):
    """Greedy. The weights change at each step, and so do the completions: no K and V of earlier weights are read."""
    plain = trained(GRPOTrainer, folder, tmp_path, generation_kwargs=GREEDY, **fields)
    paged = trained(PagedGRPOTrainer, folder, tmp_path, generation_kwargs=GREEDY, engine_config=ENGINE, **fields)
    assert_same(plain, paged)
    assert len({str(batch) for batch in plain[0].seen}) > 2, "the weights do not change the completions"


def test_a_rollout_func_does_the_same(folder, tmp_path):
    plain = trained(GRPOTrainer, folder, tmp_path, generation_kwargs=GREEDY)
    rollouts = PagedRollouts(ENGINE)
    paged = trained(GRPOTrainer, folder, tmp_path, generation_kwargs=GREEDY, rollout_func=rollouts)
    assert_same(plain, paged)
    stats = rollouts.policy.engine.stats()
    assert stats.num_cached_tokens == 0 and stats.num_prompt_tokens < sum(
        line["num_tokens"] for line in paged[1][-2:-1]
    )


@pytest.mark.parametrize("masks", [False, True])
def test_ends_and_masks_of_truncated_completions_are_those_of_the_plain_path(folder, tmp_path, masks):
    token = end_token(folder, tmp_path)
    given = {"generation_kwargs": GREEDY, "mask_truncated_completions": masks}

    def made(make: type, **fields: Any) -> Callable[..., GRPOTrainer]:
        def with_end(model: Any, **others: Any) -> GRPOTrainer:
            model.generation_config.eos_token_id = [model.config.eos_token_id, token]
            return make(model=model, **others, **fields)

        return with_end

    plain = trained(made(GRPOTrainer), folder, tmp_path, **given)
    paged = trained(made(PagedGRPOTrainer, engine_config=ENGINE), folder, tmp_path, **given)
    assert_same(plain, paged)
    lengths = {len(ids) for batch in plain[0].seen for ids in batch}
    assert len(lengths) > 1, "no completion ended early"


def test_chats_are_rendered_as_on_the_plain_path(folder, tmp_path):
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    plain = trained(GRPOTrainer, folder, tmp_path, prompts=chats, generation_kwargs=GREEDY)
    paged = trained(PagedGRPOTrainer, folder, tmp_path, prompts=chats, generation_kwargs=GREEDY, engine_config=ENGINE)
    assert_same(plain, paged)


def test_without_forgetting_training_stops_or_completions_are_stale(folder, tmp_path, monkeypatch):
    """An engine that is not told notices the steps of the optimizer. The tests above would fail if K and V stayed."""
    given = {"generation_kwargs": GREEDY, "max_steps": 8}
    plain = trained(GRPOTrainer, folder, tmp_path, **given)
    monkeypatch.setattr(Engine, "reset_prefix_cache", lambda self: None)
    with pytest.raises(WeightsChanged, match="reset_prefix_cache"):
        trained(PagedGRPOTrainer, folder, tmp_path, engine_config=ENGINE, **given)
    for look in ("changed", "any_changed"):
        monkeypatch.setattr(WeightWatch, look, lambda self: None)
    paged = trained(PagedGRPOTrainer, folder, tmp_path, engine_config=ENGINE, **given)
    assert paged[0].seen != plain[0].seen


def test_autocast_of_the_trainer_counts(folder, tmp_path):
    """Under bf16 two ways to compute round differently, so that only most first tokens are the same."""
    plain = trained(GRPOTrainer, folder, tmp_path, generation_kwargs=GREEDY, bf16=True, max_steps=1)
    paged = trained(PagedGRPOTrainer, folder, tmp_path, generation_kwargs=GREEDY, bf16=True, max_steps=1)
    first = [[ids[0] for ids in one[0].seen[0]] for one in (plain, paged)]
    assert sum(a == b for a, b in zip(*first, strict=True)) >= 3
    assert paged[2].rollouts.policy.engine.cache.gpu_cache[0].dtype == torch.float32


def test_adapters_count(folder, tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    given = {"generation_kwargs": GREEDY, "peft_config": lora, "max_steps": 8, "learning_rate": 0.3}
    plain = trained(GRPOTrainer, folder, tmp_path, **given)
    paged = trained(PagedGRPOTrainer, folder, tmp_path, engine_config=ENGINE, **given)
    assert_same(plain, paged)
    assert len({str(batch) for batch in plain[0].seen}) > 2, "the adapters do not change the completions"


def test_sampled_completions_have_the_probabilities_of_the_trained_model(folder, tmp_path):
    seen: list[dict[str, Any]] = []
    rollouts = PagedRollouts(ENGINE, returns_logprobs=True)

    def keep(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        output = rollouts(prompts, trainer)
        for ids, completion, found in zip(
            *(output[name] for name in ("prompt_ids", "completion_ids", "logprobs")), strict=True
        ):
            row = torch.tensor([ids + completion])
            with torch.no_grad():
                scores = trainer.model(row).logits[0, len(ids) - 1 : -1].log_softmax(-1)
            expected = scores.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()
            assert found == pytest.approx(expected, abs=1e-3)
        seen.append(output)
        return output

    trained(GRPOTrainer, folder, tmp_path, rollout_func=keep)
    assert len(seen) == 4 and len({str(one["completion_ids"]) for one in seen}) == 4


def test_turns_find_the_blocks_of_the_turns_before(folder, tmp_path):
    """As TRL's tool loop does it: the next prompt is the last one, its completion, and a tool's answer."""
    rewards = Rewards()
    trainer = make_trainer(PagedGRPOTrainer, folder, tmp_path, rewards, generation_kwargs=GREEDY, engine_config=ENGINE)
    plain = make_trainer(GRPOTrainer, folder, tmp_path, rewards, generation_kwargs=GREEDY)
    prompts = [list(range(20, 60)), list(range(30, 80))]
    with trainer.rollouts.fixed_weights(trainer):
        first, _ = trainer._generate_single_turn(prompts, None, {}, num_generations=1)
        turns = [prompt + ids + [9, 8, 7] for prompt, ids in zip(prompts, first, strict=True)]
        second, _ = trainer._generate_single_turn(turns, None, {}, num_generations=1)
        assert trainer.rollouts.policy.engine.stats().num_cached_tokens >= 80
    assert first == plain._generate_single_turn(prompts, None, {}, 1)[0]
    assert second == plain._generate_single_turn(turns, None, {}, 1)[0]


def test_the_methods_that_are_replaced_are_as_expected():
    check_interface(GRPOTrainer)

    class Other(GRPOTrainer):
        def _generate_single_turn(self, prompts):
            return None

    with pytest.raises(
        ImportError, match=r"_generate_single_turn must take \(self, prompt_ids.*takes \(self, prompts\)"
    ):
        check_interface(Other)


def test_the_fake_has_what_the_trainer_has(folder, tmp_path):
    trainer = make_trainer(GRPOTrainer, folder, tmp_path, Rewards())
    fake = fake_trainer.FakeTrainer(trainer.model)
    for name in [*vars(fake), "_tokenize_prompts"]:
        assert hasattr(trainer, name), name
    for name in ("unwrap_model", "autocast"):
        assert callable(getattr(trainer.accelerator, name))
    assert hasattr(trainer.accelerator.state, "deepspeed_plugin")
    own = [*inspect.signature(fake._tokenize_prompts).parameters]
    assert own == [*inspect.signature(trainer._tokenize_prompts).parameters]


@pytest.mark.parametrize("fields", [{"rollout_func": print}, {"engine_config": 3}])
def test_wrong_arguments_of_the_trainer_are_refused(folder, tmp_path, fields):
    with pytest.raises((ValueError, TypeError), match=r"rollout_func must be None|config must be an EngineConfig"):
        make_trainer(PagedGRPOTrainer, folder, tmp_path, Rewards(), **fields)


def test_the_example_learns(capsys):
    path = Path(__file__).parents[3] / "examples" / "grpo.py"
    spec = importlib.util.spec_from_file_location("grpo", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rewards = module.main(steps=12)
    assert rewards[-1] > rewards[0] + 0.1
    assert "a group's once" in capsys.readouterr().out
