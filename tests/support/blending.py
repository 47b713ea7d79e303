"""Engines that blend, their prompts, and oracles of their logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
import transformers as tf
from support import blend_oracle
from support.blend_oracle import Place, Recorder
from support.models import COMMON, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.blend import BlendConfig, SegmentKV
from kvpage.blend.segments import SegmentCache
from kvpage.serving import Engine, EngineConfig, RequestOutput, SamplingParams

B = 4


ONE = SamplingParams(max_tokens=1)


SEGMENTS = make_prompts([9, 4, 13, 1], seed=3)


LEAD = [3, 7]  # in front of the segments: nothing begins as one that is cached by itself


QUESTION = make_prompts([5], seed=4)[0]


FULL = 1e-5  # of the logits' scale


FAMILIES = {
    **{kind: lambda kind=kind: make_model(kind) for kind in (
        "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "phi3", "deepseek_v3")},
    "granite": lambda: from_config(tf.GraniteConfig(**COMMON, embedding_multiplier=3.0, residual_multiplier=0.5)),
    "cohere": lambda: from_config(tf.CohereConfig(**COMMON)),
    "smollm3": lambda: from_config(tf.SmolLM3Config(**COMMON, no_rope_layers=[1, 0, 1])),
    "phi": lambda: from_config(tf.PhiConfig(**COMMON, partial_rotary_factor=0.5)),
    "glm": lambda: from_config(tf.GlmConfig(**COMMON, head_dim=8, partial_rotary_factor=0.5)),
    "linear": lambda: scaled("linear", factor=4.0),
    "yarn": lambda: scaled("yarn", factor=4.0, original_max_position_embeddings=64),
    "llama3": lambda: scaled("llama3", factor=4.0, original_max_position_embeddings=64, low_freq_factor=1.0,
                             high_freq_factor=4.0),
}  # fmt: skip


def from_config(config: tf.PretrainedConfig) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


def scaled(kind: str, **fields: float) -> tf.PreTrainedModel:
    return from_config(tf.LlamaConfig(**COMMON, rope_parameters={"rope_type": kind, "rope_theta": 1e4, **fields}))


@cache
def model_of(family: str) -> tf.PreTrainedModel:
    return FAMILIES[family]()


def make_engine(
    family: str = "llama",
    num_blocks: int = 128,
    ratio: float = 1.0,
    segments: SegmentCache | None = None,
    **fields: object,
) -> Engine:
    names = (
        "check_layer", "metric", "filters", "seam", "separator", "boundaries", "max_bytes", "deadline",
        "uses_sensitivity",
    )  # fmt: skip
    fields = {"check_layer": 1, "deadline": 600.0, **fields}  # seconds: a busy machine is no reason to compute
    config = BlendConfig(ratio=ratio, **{name: fields.pop(name) for name in names if name in fields})
    cache = CacheConfig(block_size=B, num_gpu_blocks=num_blocks)
    return Engine.from_model(model_of(family), EngineConfig(cache, blend=config, **fields), segments=segments)


@contextmanager
def logits_of(engine: Engine) -> Iterator[list[torch.Tensor]]:
    """The logits of every forward pass of the engine inside."""
    seen: list[torch.Tensor] = []
    forward = engine.debug.runner.forward
    engine.debug.runner.forward = lambda *args: seen.append(forward(*args)) or seen[-1]
    yield seen
    engine.debug.runner.forward = forward


def drain(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output.output for output in engine.step() if output.output}
    return outputs


def serve(
    engine: Engine, parts: list[list[int]], question: list[int] = QUESTION, lead: list[int] = LEAD
) -> tuple[RequestOutput, torch.Tensor]:
    """One blended prompt of these segments: its output, and the logits of its first token."""
    with logits_of(engine) as seen:
        every = [lead, *parts] if lead else parts
        tokens = [token for part in every for token in part] + question
        request_id = engine.add_request(tokens, ONE, blend=True, segments=[len(part) for part in every])
        output = drain(engine)[request_id]
    return output, seen[-1][-1]


def own_logits(model: tf.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return blend_oracle.run(model, tokens, 0, Recorder(check_layer=10**6))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def standalone(model: tf.PreTrainedModel, parts: list[list[int]], is_measured: bool = True) -> list[Place]:
    starts = [len(LEAD) + sum(map(len, parts[:index])) for index in range(len(parts))]
    return [blend_oracle.place(model, [], part, start, is_measured) for part, start in zip(parts, starts, strict=True)]


def prompt_of(parts: list[list[int]], question: list[int] = QUESTION, lead: list[int] = LEAD) -> list[int]:
    return [token for part in [lead, *parts, question] for token in part]


def lengths_of(parts: list[list[int]]) -> list[int]:
    return [len(LEAD), *map(len, parts)]


def first_logits(engine: Engine) -> torch.Tensor:
    """The logits of one step, with the segments of all that waits at hand."""
    engine.debug.connectors.ask(engine.scheduler.waiting)
    engine.debug.blend.drain()
    with logits_of(engine) as seen:
        engine.step()
    assert len(seen) == 1
    return seen[0]


def cut(places: list[Place], start: int) -> list[Place]:
    """What of them lies at `start` or behind it."""
    kept = []
    for one in places:
        at = max(start - one.start, 0)
        if at < one.k[0].shape[1]:
            rows = [k[:, at:] for k in one.k], [v[:, at:] for v in one.v]
            kept.append(Place(one.start + at, *rows, at, one.sensitivity and one.sensitivity[at:]))
    return kept


def serve_plainly(engine: Engine, tokens: list[int]) -> tuple[RequestOutput, torch.Tensor]:
    with logits_of(engine) as seen:
        output = engine.generate([tokens], ONE)[0]
    return output, seen[-1][-1]


def kept(engine: Engine, tokens: list[int], namespace: bytes = b"") -> SegmentKV | None:
    engine.debug.blend.drain()
    return engine.debug.blend.source.find(np.array(tokens, np.int32), namespace)


def keep_unmeasured(engine: Engine, tokens: list[int]) -> None:
    """As the first segment of a prompt is."""
    engine.add_request(tokens, ONE, segments=[len(tokens)])
    drain(engine)
    assert kept(engine, tokens).is_standalone and kept(engine, tokens).sensitivity is None
