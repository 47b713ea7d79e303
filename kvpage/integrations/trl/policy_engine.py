"""PolicyEngine: answers of a model that is being trained. K and V never outlive the weights that computed them.

prompts ─► groups of equal ones ─► one request a group, n samples ─► Engine ─► an answer for each prompt
             computed once           whose blocks they share            forgets all K and V before and after
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from kvpage.integrations.trl.trained_model import check_stand_in, eval_mode, stand_in
from kvpage.layout.config import CacheConfig, ModelConfig
from kvpage.serving import Engine, EngineConfig, RequestOutput, Sample, SamplingParams

BLOCK_SIZE, MAX_CACHE_BYTES = 16, 2**30
MAX_DRAWN_SEED = 2**62

Group = tuple[tuple[int, ...], list[int]]
"""A prompt, and its places among all prompts."""


def rollout_config(model: PreTrainedModel, max_num_seqs: int = 64) -> EngineConfig:
    """Return the settings of an engine whose cache takes 1 GiB at most.

    Args:
        model: The model that will be served.
        max_num_seqs: Answers that are generated at once.

    Returns:
        The settings. The cache has no more blocks than max_num_seqs sequences of the model's length fill.
    """
    shape = ModelConfig.from_hf(model.config, model.dtype)
    fitting = CacheConfig.for_memory(MAX_CACHE_BYTES, shape, block_size=BLOCK_SIZE)
    longest: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    most = fitting.num_gpu_blocks if longest is None else max_num_seqs * -(-longest // BLOCK_SIZE)
    num_blocks = min(fitting.num_gpu_blocks, most)
    return EngineConfig(CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_blocks), max_num_seqs=max_num_seqs)


class PolicyEngine:
    """An engine over a model that is being trained. It belongs to the thread that trains.

    It owns the cache, not the model. The model may be in training mode: all modules are in eval mode while it answers,
    and as they were afterwards. So no dropout takes part.

    Every call of `sample` begins with an empty cache. So whatever has changed in between, by an optimiser, a checkpoint
    or an adapter, no K and V of other weights are read. Within `fixed_weights` calls share their prefixes.

    Args:
        model: A decoder of transformers. It may have adapters, and a forward that TRL or accelerate has patched.
        config: The settings of the engine. None means `rollout_config(model)`.
        autocast: Returns the context that the model computes under, such as `Accelerator.autocast`.

    Raises:
        ValueError: The model cannot be served, see `Engine.from_model`; or its forward was patched by others, to
            compute something else.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig | None = None,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.model, self._autocast = model, autocast
        with eval_mode(model):
            served = stand_in(model)
            check_stand_in(model, served, autocast())
            self.engine = Engine.from_model(served, config or rollout_config(model))
            if self.engine.cache.device.type == "cuda":
                self.engine.warmup()
        self._keeps = False

    @contextmanager
    def fixed_weights(self) -> Iterator[None]:
        """Promise that the weights do not change within, so that calls of `sample` find each other's prefixes.

        The turns of a conversation are such calls. The cache is empty at the beginning and at the end.

        Raises:
            RuntimeError: It is entered already.
        """
        if self._keeps:
            raise RuntimeError("fixed_weights must be left before it is entered again")
        self.engine.reset_prefix_cache()
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False
            self.engine.reset_prefix_cache()

    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Sample]:
        """Answer each prompt. Equal prompts are computed once, and their answers drawn independently.

        Args:
            prompts: Token ids of each prompt, at least one.
            params: The rules. `n` and `seed` are not taken from it: seeds are drawn from torch's default generator.
                `max_tokens` is cut where the model takes no more positions.

        Returns:
            The answers, in the order of the prompts.

        Raises:
            ValueError: A prompt or a parameter is not served; see `Engine.add_request`.
            RuntimeError: An answer could not be computed, with the reason.
        """
        with nullcontext() if self._keeps else self.fixed_weights(), eval_mode(self.model), self._autocast():
            groups = _groups(prompts, self.engine.config.max_num_seqs)
            asked = [self._params(params, len(prompt), len(places)) for prompt, places in groups]
            outputs = self.engine.generate([list(prompt) for prompt, _ in groups], asked)
        return _in_order(groups, outputs)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probabilities of whole sequences under the current weights.

        With `EngineConfig(same_bits=True)` those of an answer are the ones that `sample` returned, bit by bit, as long
        as the weights do not change.

        Args:
            sequences: Token ids of each: a prompt and its answer, for example.

        Returns:
            For each sequence a number for each of its tokens but the first; see `Engine.score`.

        Raises:
            ValueError, RuntimeError: As `Engine.score`.
        """
        with nullcontext() if self._keeps else self.fixed_weights(), eval_mode(self.model), self._autocast():
            return self.engine.score(sequences)

    def _params(self, params: SamplingParams, num_prompt_tokens: int, num_samples: int) -> SamplingParams:
        seed = None if params.is_greedy else int(torch.randint(MAX_DRAWN_SEED, ()))
        room = max(self.engine.max_model_len - num_prompt_tokens, 1)
        max_tokens = None if params.max_tokens is None else min(params.max_tokens, room)
        return replace(params, n=num_samples, seed=seed, max_tokens=max_tokens)


def _groups(prompts: Sequence[Sequence[int]], most: int) -> list[Group]:
    """Return the distinct prompts, each with its places; a prompt of more than `most` places comes several times."""
    places: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        places.setdefault(tuple(prompt), []).append(index)
    return [(prompt, all_[at : at + most]) for prompt, all_ in places.items() for at in range(0, len(all_), most)]


def _in_order(groups: Sequence[Group], outputs: Sequence[RequestOutput]) -> list[Sample]:
    samples: dict[int, Sample] = {}
    for (_, places), output in zip(groups, outputs, strict=True):
        if output.error is not None:
            raise RuntimeError(f"{len(places)} answers to a prompt could not be computed: {output.error}")
        samples.update(zip(places, output.samples, strict=True))
    return [samples[index] for index in range(len(samples))]
