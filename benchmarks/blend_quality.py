"""Answers of the small Llama over blended documents, method by method, with intervals over documents."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from transformers import LlamaForCausalLM

from kvpage import CacheConfig
from kvpage.benchmarks import blend_task as task
from kvpage.benchmarks.blend_methods import KNOWN_BEFORE, KV_SHARE, METHODS, Blending, Truth, probes
from kvpage.benchmarks.blend_model import Rows, RowSwap, Swap, pack, some_facts
from kvpage.benchmarks.blend_speed import first_token
from kvpage.blend import BlendConfig, RotaryTables
from kvpage.blend.sensitivity import measure_sensitivity
from kvpage.serving import Engine, EngineConfig

Seen = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1.0)
BATCH = 20
NUM_RESAMPLES = 1000


class Method(NamedTuple):
    """stages: (check layer, ratio) of each; see Blending."""

    name: str
    stages: tuple[tuple[int, float], ...]


class Answers(NamedTuple):
    """Return for each question: bool [num_documents, num_questions].

    agrees: it says what a full recompute says. drawn: it is about any fact. cross: about one whose name stands in an
    earlier segment. share_found: of the rows that refer to one, those that were chosen. share_computed: of the
    documents' arithmetic with weights in all layers.
    """

    right: torch.Tensor
    agrees: torch.Tensor
    drawn: torch.Tensor
    cross: torch.Tensor
    share_found: float
    share_computed: float


class Batch:
    """Documents, half of the questions about any facts, half about facts that refer to another segment."""

    def __init__(
        self, model: LlamaForCausalLM, attention: RowSwap, documents: task.Documents, segment: int, asked: int
    ):
        self._model, self._attention = model, attention
        draw = torch.Generator().manual_seed(7)
        any_fact = some_facts(documents, asked, draw)
        is_cross = documents.is_cross(segment)
        cross = torch.multinomial(is_cross.float() + 1e-9, asked, replacement=True, generator=draw)
        where = torch.cat([any_fact, cross], dim=1)
        questions, self.answers = task.ask(documents, where)
        self.num_tokens = documents.tokens.shape[1]
        self.cross = is_cross.gather(1, where)
        self.drawn = (torch.arange(2 * asked) < asked) & (self.answers != task.NOBODY)
        self.ids, self._positions, self._mask = pack(documents.tokens, questions)
        self.within: list[torch.Tensor] = []
        self.retrieved = self._retrieve(documents.tokens, segment)
        fresh: list[Rows] = []

        def keep(layer: int, query: torch.Tensor, *rows: torch.Tensor) -> Rows:
            fresh.append((rows[0], rows[1]))
            return fresh[-1]

        self.full = self.run(keep)
        here = torch.arange(self.num_tokens)
        refers = (documents.named_at >= 0) & (documents.named_at // segment < here // segment)
        segments = documents.tokens.unflatten(1, (-1, segment))
        changed = {name: self._sensitivity(segments, probe) for name, probe in probes(segments)}
        self.truth = Truth(self._deviation(fresh), refers, here % segment, changed)

    def blending(self, method: Method) -> Blending:
        return Blending(self.retrieved, self.within, self.truth, METHODS[method.name], method.stages)

    def own_model(self) -> LlamaForCausalLM:
        """A copy with an attention of transformers' own."""
        model = LlamaForCausalLM(copy.deepcopy(self._model.config))
        model.load_state_dict(self._model.state_dict())
        model.set_attn_implementation("eager")
        return model.eval()

    def run(self, swap: Swap) -> torch.Tensor:
        """The answers: [num_documents, num_questions]."""
        logits = self._forward(swap, self._mask, input_ids=self.ids, position_ids=self._positions)
        return logits[:, self.num_tokens + 1 :: 2].argmax(-1)

    def _forward(self, swap: Swap, mask: torch.Tensor | None, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits, with K and V of each layer as `swap` gives them."""
        self._attention.mask, self._attention.swap = mask, swap
        with torch.inference_mode():
            logits: torch.Tensor = self._model(use_cache=False, **inputs).logits
        self._attention.swap = None
        return logits

    def _seen(self, **inputs: torch.Tensor) -> list[Seen]:
        """Return Q, K and V of each layer, of rows that see all before them."""
        seen: list[Seen] = []

        def keep(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Rows:
            seen.append((query, key, value))
            return key, value

        self._forward(keep, None, **inputs)
        return seen

    def _retrieve(self, tokens: torch.Tensor, segment: int) -> list[Rows]:
        """K and V of each segment computed by itself from position 0 on, K rotated to the place of the segment; and how
        its rows attended to each other, in `within`."""
        count, num_tokens = tokens.shape
        old, new = torch.arange(num_tokens) % segment, torch.arange(num_tokens)
        config = self._model.config
        frequencies = self._model.model.rotary_emb.inv_freq
        rotary = RotaryTables.of_frequencies(frequencies, config.hidden_size // config.num_attention_heads)
        rows: list[Rows] = []
        for query, key, value in self._seen(input_ids=tokens.reshape(-1, segment)):
            whole = [part.unflatten(0, (count, -1)).transpose(1, 2).flatten(2, 3) for part in (key, value)]
            rows.append((rotary.rotate(whole[0], old, new, token_dim=2), whole[1]))
            scores = query @ key.transpose(2, 3) / key.shape[-1] ** 0.5
            seen = torch.ones(segment, segment, dtype=torch.bool).tril()
            weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1).mean(dim=1)
            self.within.append(weights.unflatten(0, (count, -1)))
        return rows

    def _sensitivity(self, segments: torch.Tensor, probe: torch.Tensor) -> torch.Tensor:
        """[num_documents, num_tokens]. segments, probe: [num_documents, num_segments, their number of tokens]."""
        count, num_segments, num_before = probe.shape
        tokens = torch.cat([probe, segments], dim=2).flatten(0, 1)
        behind = [value[:, :, num_before:].transpose(1, 2) for _, _, value in self._seen(input_ids=tokens)]
        values = (value.transpose(1, 2).unflatten(1, (num_segments, -1)) for _, value in self.retrieved)
        alone = [value.flatten(0, 1).contiguous() for value in values]
        changes = [
            measure_sensitivity((before[number], now[number]) for before, now in zip(alone, behind, strict=True))
            for number in range(count * num_segments)
        ]
        sensitivity = torch.stack([change for change in changes if change is not None])
        sensitivity = sensitivity.unflatten(0, (count, num_segments))
        sensitivity[:, 0] = 0.0  # it has no new tokens before it
        return sensitivity.flatten(1)

    def _deviation(self, fresh: Sequence[Rows]) -> torch.Tensor:
        """Over all layers, K's and V's each in units of their size in that layer."""
        total = torch.zeros(())
        for now, before in zip(fresh, self.retrieved, strict=True):
            for part, old in zip(now, before, strict=True):
                difference = (part[:, :, : self.num_tokens] - old).square().mean(dim=(1, 3))
                total = total + difference / old.square().mean()
        return total


def answers(batches: Sequence[Batch], method: Method) -> Answers:
    parts = []
    for batch in batches:
        blending, refers = batch.blending(method), batch.truth.refers
        said = batch.run(blending)
        found = float((blending.chosen & refers).sum() / refers.sum())
        computed = blending.num_computed / (refers.numel() * len(batch.retrieved))
        parts.append(Answers(said == batch.answers, said == batch.full, batch.drawn, batch.cross, found, computed))
    names = "right", "agrees", "drawn", "cross"
    right, agrees, drawn, cross = (torch.cat([getattr(part, name) for part in parts]) for name in names)
    found, computed = (sum(getattr(part, name) for part in parts) / len(parts) for name in Answers._fields[4:])
    return Answers(right, agrees, drawn, cross, found, computed)


class Estimate(NamedTuple):
    """A mean over questions, and the 2.5 % and 97.5 % points of its bootstrap over documents."""

    mean: float
    low: float
    high: float


def estimate(right: torch.Tensor, counted: torch.Tensor) -> Estimate:
    """right, counted: [num_documents, num_questions]."""
    return _bootstrap((right & counted).sum(1), counted.sum(1))


def difference(right: torch.Tensor, other: torch.Tensor, counted: torch.Tensor) -> Estimate:
    """Compare two methods' means over the same questions, resampled together."""
    return _bootstrap(((right.int() - other.int()) * counted).sum(1), counted.sum(1))


def _bootstrap(hits: torch.Tensor, counts: torch.Tensor) -> Estimate:
    """hits, counts: of each document."""
    picks = torch.randint(len(hits), (NUM_RESAMPLES, len(hits)), generator=torch.Generator().manual_seed(0))
    means = hits.double()[picks].sum(1) / counts[picks].sum(1).clamp(min=1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
    return Estimate(float(hits.sum() / counts.sum().clamp(min=1)), low, high)


BY_RATIO = ("v", "v at seams", "behind itself", "behind a stranger", "first rows", "random", "oracle deviation")
BY_CHECK = ("v", "v at seams", "v passed on", "v followed", "behind itself")


def methods(num_layers: int) -> Iterator[Method]:
    """Some by ratio, and all at 15 %, at check layer 1, or 0 where they need not look; these at layer 1, too; some at
    later check layers; and filtered gradually, each beside the ratio that takes as much work at check layer 1."""
    for name in METHODS:
        check = 0 if name in KNOWN_BEFORE else 1
        for ratio in RATIOS if name in BY_RATIO else (0.15,):
            yield Method(name, ((check, ratio),))
        yield Method(name, ((1, 0.15),))
    for check in range(2, min(4, num_layers - 1)):
        for name in BY_CHECK:
            yield Method(name, ((check, 0.15),))
    for name in ("v", "v at seams"):
        last = 2 * num_layers // 3
        for first in (0.3, 0.5):
            for stages in (((1, first), (2, 0.15)), ((1, first), (last, 0.15))):
                yield Method(name, stages)
                yield Method(name, ((1, equal_ratio(stages, num_layers)),))


def equal_ratio(stages: Sequence[tuple[int, float]], num_layers: int) -> float:
    """Measure one check layer, for as much work as these stages take, of which the first is at that layer.

    Work behind it: each stage's rows up to the next stage, and K and V of all that is let go, 1 - the last ratio.
    """
    ends = [*(layer for layer, _ in stages[1:]), num_layers]
    rows = sum(ratio * (end - layer) for (layer, ratio), end in zip(stages, ends, strict=True))
    return round((rows - KV_SHARE * stages[-1][1]) / (num_layers - stages[0][0] - KV_SHARE), 3)


def batches(
    model: LlamaForCausalLM, attention: RowSwap, num_documents: int, num_tokens: int, segment: int, seed: int
) -> list[Batch]:
    """Documents that no training has seen."""
    seeds = (2_000_000_000 + seed * 1000 + index for index in range(-(-num_documents // BATCH)))
    documents = (task.write_documents(BATCH, num_tokens, seed=one) for one in seeds)
    return [Batch(model, attention, each, segment, 16) for each in documents]


class Agreement(NamedTuple):
    """Compare answers of the engine with those of this file's blending: shares that are equal, and right in each."""

    equal: float
    right: float
    right_here: float


ENGINES = {
    "behind itself": (0, BlendConfig()),
    "v at seams": (1, BlendConfig(uses_sensitivity=False)),
    "v": (1, BlendConfig(uses_sensitivity=False, seam=0.0)),
}
"""Methods as an engine has them: by default the first. The check layer, and the config."""


def engine_agreement(batch: Batch, segment: int, ratio: float, name: str) -> Agreement:
    """By the engine's own choice of rows, with a config that makes it the method `name`: one of ENGINES.

    ratio: of the rows that the engine finds no prefix for: as many as of all rows here, where the first segment's do
    not differ.
    """
    num_tokens, num_asked = batch.num_tokens, batch.answers.shape[1]
    check_layer, blend = ENGINES[name]
    here = batch.run(batch.blending(Method(name, ((check_layer, ratio * (1 - segment / num_tokens)),))))
    cache = CacheConfig(block_size=math.gcd(segment, 8), num_gpu_blocks=4 * num_tokens)
    engine = Engine.from_model(batch.own_model(), EngineConfig(cache, blend=replace(blend, ratio=ratio)))
    lengths, said = [segment] * (num_tokens // segment), torch.empty_like(here)
    for row, ids in enumerate(batch.ids.tolist()):
        document, questions = ids[:num_tokens], ids[num_tokens:]
        engine.warm_segments([document[at : at + segment] for at in range(0, num_tokens, segment)])
        for index in range(num_asked):
            prompt = document + questions[2 * index : 2 * index + 2]
            said[row, index] = first_token(engine, prompt, lengths).token
    shares = (here == said, said == batch.answers, here == batch.answers)
    return Agreement(*(float(share.float().mean()) for share in shares))
