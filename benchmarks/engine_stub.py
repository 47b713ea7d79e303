"""An engine whose model returns logits that were made before: what is left of a step is the engine's own."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as tf
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvpage import CacheConfig
from kvpage.benchmarks.part_clock import PartClock, Spent, mean_spent, spent_by
from kvpage.blocks.rows import SequenceSteps
from kvpage.checks.tokens import Tokens
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.serving.loop import serving_loop
from kvpage.serving.loop.batch.batch_runner import BatchRunner
from kvpage.serving.loop.scheduler import Scheduler
from kvpage.serving.model.runner import ModelRunner

BLOCK_SIZE, BATCHED_TOKENS, HEAD_SIZE = 16, 2048, 16
PROMPT_LENS = (64, 128)  # from, up to
LONG, CACHED = 8192, 6144  # of the prompt to admit
NUM_ADMITTED = 8  # prompts in a row that make one measurement
NUM_SETS = 4  # of logits, which take turns
Prompt = list[int]


class PreparedLogits:
    """Logits for each step, which an engine's copy of the model shares. last: those of the last step, [rows, vocab];
    None as long as the model computes.
    """

    def __init__(self) -> None:
        self.last: torch.Tensor | None = None
        self._sets: Iterator[torch.Tensor] = iter(())

    def make(self, num_rows: int, vocab: int) -> None:
        """From now on the model is a stub."""
        logits = torch.randn(NUM_SETS, num_rows, vocab, generator=torch.Generator().manual_seed(0))
        self._sets, self.last = itertools.cycle(logits.unbind()), logits[0]

    def take(self, num_rows: int) -> torch.Tensor:
        self.last = next(self._sets)[:num_rows]
        return self.last


class StubOutput(NamedTuple):
    """A model's output, without the time that transformers takes to make one."""

    logits: torch.Tensor


class StubbedLlama(tf.LlamaForCausalLM):
    """A Llama until its logits are made, so that an engine accepts it; then a stub that counts as attending."""

    def __init__(self, config: tf.LlamaConfig) -> None:
        super().__init__(config)
        self.prepared = PreparedLogits()

    def forward(
        self, input_ids: Any = None, position_ids: Any = None, logits_to_keep: Any = 0, **kwargs: Any
    ) -> CausalLMOutputWithPast | StubOutput:
        if self.prepared.last is None:
            return super().forward(
                input_ids=input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, **kwargs
            )
        step = kwargs["kvpage"]
        step.calls += [(layer, None) for layer in step.caches]
        num_rows = input_ids.shape[1] if isinstance(logits_to_keep, int) else len(logits_to_keep)
        return StubOutput(self.prepared.take(num_rows)[None])


PARTS: dict[str, list[tuple[Any, str]]] = {
    "schedule": [(Scheduler, "schedule")],
    "slots and tables": [(SequenceSteps, "slots"), (SequenceSteps, "tables"), (SequenceSteps, "inputs")],
    "make the step": [(BatchRunner, "compute"), (ModelRunner, "forward")],
    "the stub": [(StubbedLlama, "forward")],
    "sample": [(serving_loop, "choose_tokens")],
    "complete": [(Scheduler, "complete")],
    "hand out, and the rest": [(Engine, "step")],
}


def random_prompt(rng: np.random.Generator, vocab: int, num_tokens: int) -> Prompt:
    tokens: Prompt = rng.integers(1, vocab, num_tokens).tolist()
    return tokens


def make_model(vocab: int) -> StubbedLlama:
    config = tf.LlamaConfig(
        vocab_size=vocab, hidden_size=HEAD_SIZE, intermediate_size=HEAD_SIZE, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=16384, pad_token_id=0,
        bos_token_id=None, eos_token_id=None, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(0)
    return StubbedLlama._from_config(config, attn_implementation="sdpa").eval()


def make_engine(model: StubbedLlama, num_seqs: int, num_tokens: int) -> Engine:
    """Return an engine whose model is a stub. num_tokens: of a sequence at most."""
    cache = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_seqs * (num_tokens // BLOCK_SIZE + 2))
    config = EngineConfig(cache, max_num_seqs=num_seqs, max_num_batched_tokens=BATCHED_TOKENS)
    engine = Engine.from_model(model, config)
    model.prepared.make(num_seqs, model.config.vocab_size)
    return engine


def decode_prompts(num: int, vocab: int) -> list[Prompt]:
    """Return prompts of different lengths."""
    rng = np.random.default_rng(0)
    return [random_prompt(rng, vocab, int(rng.integers(*PROMPT_LENS))) for _ in range(num)]


class Decoding:
    """`num_seqs` sequences that have their first token, and requests that wait because no more may run."""

    def __init__(self, vocab: int, num_seqs: int, num_waiting: int, params: SamplingParams) -> None:
        """Args: params: with the number of tokens that each sequence can still generate."""
        self._model, self._num_seqs, self._params = make_model(vocab), num_seqs, params
        self._engine = make_engine(self._model, num_seqs, PROMPT_LENS[1] + (params.max_tokens or 0))
        for prompt in decode_prompts(num_seqs + num_waiting, vocab):
            self._engine.add_request(prompt, params)
        while len(self._engine.step()) < num_seqs:
            pass
        self._check()

    def spent(self, num_steps: int) -> Spent:
        """Return the mean time of a step."""
        return spent_by(self._engine.step, num_steps)

    def parts(self, num_steps: int) -> dict[str, float]:
        """Return the seconds of each part of a step, a mean."""
        with PartClock(PARTS) as clock:
            for _ in range(num_steps):
                self._engine.step()
        return {part: taken / num_steps for part, taken in clock.seconds.items()}

    def argmax(self, num_steps: int) -> Spent:
        """Return the time of the bound."""
        return spent_by(lambda: self._model.prepared.take(self._num_seqs).max(dim=-1), num_steps)

    def _check(self) -> None:
        """AssertionError unless a step takes the likeliest tokens, or draws from the likeliest that top_k leaves."""
        tokens = torch.tensor([output.token_id for output in self._engine.step()])
        logits = self._model.prepared.last
        assert logits is not None and len(tokens) == self._num_seqs, f"{self._num_seqs} tokens, got {len(tokens)}"
        if self._params.is_greedy:
            assert torch.equal(tokens, logits.argmax(dim=-1)), "the likeliest tokens"
        elif self._params.repetition_penalty is None:
            ranks = (logits > logits.gather(1, tokens[:, None])).sum(dim=-1)
            assert (ranks < (self._params.top_k or logits.shape[1])).all(), "tokens among the likeliest"


class Admission:
    """A prompt most of whose tokens are cached, to be admitted again and again with another end."""

    def __init__(self, vocab: int) -> None:
        model, self._vocab, self._rng = make_model(vocab), vocab, np.random.default_rng(0)
        self.prefix = random_prompt(self._rng, vocab, CACHED)
        self._engine = make_engine(model, 8, LONG + 1)
        self._engine.add_request(self.prefix, SamplingParams(max_tokens=1, ignore_eos=True))
        while self._engine.has_unfinished:
            self._engine.step()

    def prompt(self) -> Prompt:
        """Return the cached tokens and others."""
        return self.prefix + random_prompt(self._rng, self._vocab, LONG - CACHED)

    def spent(self, as_array: bool) -> Spent:
        """Return the time from token ids to a scheduled request, a mean of some: an array, or a list."""
        prompts = [self.prompt() for _ in range(NUM_ADMITTED)]
        return mean_spent([self._admit(np.array(prompt, np.int32) if as_array else prompt) for prompt in prompts])

    def _admit(self, tokens: Tokens) -> Spent:
        params, engine, name = SamplingParams(max_tokens=1, ignore_eos=True), self._engine, "again"

        def admit() -> None:
            engine.add_request(tokens, params, name)
            engine.scheduler.schedule()

        taken = spent_by(admit)
        output = engine.abort(name)
        assert output.num_cached_tokens == CACHED, f"{CACHED} tokens are cached, got {output.num_cached_tokens}"
        return taken
