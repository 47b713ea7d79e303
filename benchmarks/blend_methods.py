"""How rows of a blended document may be chosen for recomputing; bench_blend compares them.

A method scores the rows of a batch of documents in the check layer, from that layer's Q, and from its K and V, fresh
and retrieved; the share `ratio` of the rows with the largest scores is computed again. Oracles know what a full
recompute would have given.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from kvpage.benchmarks import blend_task as task
from kvpage.benchmarks.blend_model import Rows
from kvpage.blend.selection import SEAM, seam_weights

KV_SHARE = 0.2
"""The share of K and V in the weights of a layer of blend_model's Llama: 2 of 4 + 3 * 2 squares of the hidden size."""


class Layer(NamedTuple):
    """The inputs of a method, of documents' rows. query: also of the questions' rows, which come after them.

    within: of each layer, the attention among a segment's rows when it was computed by itself, a mean over heads:
        [batch, segments, rows, rows].
    """

    number: int
    query: torch.Tensor
    fresh: Rows
    retrieved: Rows
    within: Sequence[torch.Tensor]


class Truth(NamedTuple):
    """Facts about each document row that an oracle knows, and those that a method knows without looking at K and V.

    deviation: over all layers. refers: the row's meaning depends on a segment before its own. offset: in its segment.
    sensitivity: after each of `probes`, how much V changed, as kvpage.blend measures it when a segment is kept; 0 in a
        document's first segment, before which nothing stands here either.
    """

    deviation: torch.Tensor
    refers: torch.Tensor
    offset: torch.Tensor
    sensitivity: Mapping[str, torch.Tensor]


Score = Callable[[Layer, Truth], torch.Tensor]
"""fp32 [batch, rows]."""
Stages = Sequence[tuple[int, float]]


def squares(layer: Layer, part: int) -> torch.Tensor:
    """Mean squared difference of each row and head, in K (part 0) or V (part 1): [batch, heads, rows]."""
    return (layer.fresh[part] - layer.retrieved[part]).square().mean(dim=-1)


def deviation(layer: Layer, metric: str) -> torch.Tensor:
    """Choose as kvpage.blend does. metric: k, v or kv."""
    return sum((squares(layer, "kv".index(part)).mean(dim=1) for part in metric), torch.zeros(()))


def in_units(values: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    return values / units.clamp(min=1e-12)


def attention(layer: Layer, rows: slice) -> torch.Tensor:
    """Return the attention of `rows` to the documents' rows, causal: [batch, heads, rows, document rows]."""
    keys = layer.fresh[0]
    scores = layer.query[:, :, rows] @ keys.transpose(2, 3) / keys.shape[-1] ** 0.5
    here = torch.arange(layer.query.shape[2])[rows]
    return scores.masked_fill(here[:, None] < torch.arange(keys.shape[2]), -torch.inf).softmax(dim=-1)


def balanced(layer: Layer, truth: Truth) -> torch.Tensor:
    """K and V, each in units of its own mean square, so that neither drowns the other."""
    sizes = [part.square().mean() for part in layer.retrieved]
    return squares(layer, 0).mean(dim=1) / sizes[0] + squares(layer, 1).mean(dim=1) / sizes[1]


def largest_head(layer: Layer, truth: Truth) -> torch.Tensor:
    """V of the head that differs most, each in units of its mean difference: rows of one head count in full."""
    each = squares(layer, 1)
    return in_units(each, each.mean(dim=2, keepdim=True)).amax(dim=1)


def relative(layer: Layer, truth: Truth) -> torch.Tensor:
    """V's difference over its own size."""
    return in_units(squares(layer, 1).mean(dim=1), layer.retrieved[1].square().mean(dim=(1, 3)))


def asked_for(layer: Layer, truth: Truth) -> torch.Tensor:
    """V's difference, weighted by the attention of the questions' rows."""
    paid = attention(layer, slice(layer.fresh[0].shape[2], None)).mean(dim=2)
    return (squares(layer, 1) * paid).mean(dim=1)


def passed_on(layer: Layer, truth: Truth) -> torch.Tensor:
    """V's difference, and that of the rows a row attends to: its change in the next layer."""
    weights = attention(layer, slice(0, layer.fresh[0].shape[2]))
    change = weights @ (layer.fresh[1] - layer.retrieved[1])
    own, passed = squares(layer, 1).mean(dim=1), change.square().mean(dim=(1, 3))
    return in_units(own, own.mean()) + in_units(passed, passed.mean())


def at_seams(layer: Layer, truth: Truth) -> torch.Tensor:
    """Choose as kvpage.blend does by default: V's difference, which counts for more near a segment's begin."""
    return deviation(layer, "v") * seam_weights(truth.offset, SEAM)


def followed(layer: Layer, truth: Truth) -> torch.Tensor:
    """Near a segment's begin more of V's difference, relative to its size, and what follows from it in the next three
    layers: as much as the segment's rows attended to each other there. A cache would have to keep that."""
    change = relative(layer, truth).sqrt().unflatten(1, layer.within[0].shape[1:3])
    for weights in layer.within[layer.number : layer.number + 3]:
        change = change + (weights @ change[..., None])[..., 0]
    return change.flatten(1) * (1 + 3 * torch.exp(-truth.offset / 8))


def changed_behind(*probes: str) -> Score:
    """V's change in all layers when the segment was kept and computed once more after a probe; the mean of several."""
    return lambda layer, truth: torch.stack([truth.sensitivity[name] for name in probes]).mean(dim=0)


def first_rows(layer: Layer, truth: Truth) -> torch.Tensor:
    return -truth.offset.float().expand(layer.query.shape[0], -1)


def random_rows(layer: Layer, truth: Truth) -> torch.Tensor:
    draw = torch.Generator().manual_seed(layer.number)
    return torch.rand(truth.deviation.shape, generator=draw)


METHODS: dict[str, Score] = {
    "v": lambda layer, truth: deviation(layer, "v"),
    "k": lambda layer, truth: deviation(layer, "k"),
    "kv": lambda layer, truth: deviation(layer, "kv"),
    "kv balanced": balanced,
    "v relative": relative,
    "v largest head": largest_head,
    "v asked for": asked_for,
    "v passed on": passed_on,
    "v at seams": at_seams,
    "v followed": followed,
    **{
        f"behind {name}": changed_behind(name)
        for name in ("itself", "half of itself", "itself reversed", "random tokens", "a stranger", "two strangers")
    },
    "behind both": changed_behind("itself", "a stranger"),
    "behind itself, seams": lambda layer, truth: truth.sensitivity["itself"] * seam_weights(truth.offset, SEAM),
    # The sensitivity of the segment, with the difference that the check layer sees here.
    "behind itself, v": lambda layer, truth: truth.sensitivity["itself"] * deviation(layer, "v").sqrt(),
    "first rows": first_rows,
    # V's difference, and before all others the first four rows of each segment.
    "first 4 and v": lambda layer, truth: deviation(layer, "v") + 1e6 * (truth.offset < 4),
    "random": random_rows,
    "oracle deviation": lambda layer, truth: truth.deviation,
    # Rows that refer to another segment; among these, and after them, those that deviate most over all layers.
    "oracle meaning": lambda layer, truth: truth.deviation + 1e6 * truth.refers,
}
KNOWN_BEFORE = {name for name in METHODS if name.startswith("behind ") and name != "behind itself, v"}
"""Methods whose inputs are known before any layer is computed."""


def probes(segments: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names of probes, and for each segment the tokens to put before it, which know nothing of its document.

    segments: int64 [num_documents, num_segments, segment_tokens].
    """
    size, draw = segments.shape[2], torch.Generator().manual_seed(8)
    yield "itself", segments
    yield "half of itself", segments[..., size // 2 :]
    yield "itself reversed", segments.flip(2)
    yield "random tokens", torch.randint(task.VOCAB_SIZE, segments.shape, generator=draw)
    yield "a stranger", _of_another_document(segments, draw)
    yield "two strangers", torch.cat([_of_another_document(segments, draw) for _ in range(2)], dim=2)


def _of_another_document(segments: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    count, places, _ = segments.shape
    others = (torch.arange(count)[:, None] + torch.randint(1, count, (count, places), generator=draw)) % count
    return segments[others, torch.randint(places, (count, places), generator=draw)]


def largest(score: torch.Tensor, ratio: float, among: torch.Tensor) -> torch.Tensor:
    """bool [batch, rows]: the share `ratio` of all rows, at least one, out of those `among`; of equals the first."""
    num_rows = score.shape[1]
    count = min(num_rows, max(int(num_rows * ratio), 1)) if ratio > 0 else 0
    ranked = score.masked_fill(~among, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(among).scatter_(1, ranked, True) & among


class Blending:
    """The swap of a RowSwap that blends: see blend_model.

    stages: (check layer, ratio) ascending in layers and descending in ratio: one, or several as in gradual filtering,
    where each chooses among what the one before has left.
    """

    def __init__(
        self, retrieved: Sequence[Rows], within: Sequence[torch.Tensor], truth: Truth, score: Score, stages: Stages
    ) -> None:
        self._retrieved, self._within, self._truth = retrieved, within, truth
        self._score, self._stages = score, dict(stages)
        self.chosen = torch.ones_like(truth.refers)
        self.num_computed = 0.0
        """Rows of documents, summed over layers; those that a layer lets go, whose K and V it has computed, in part."""

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Rows:
        old_key, old_value = self._retrieved[layer]
        num_rows, keep = old_key.shape[2], self.chosen[:, None, :, None]
        num_begun = int(self.chosen.sum())
        key, value = key.clone(), value.clone()
        fresh = key[:, :, :num_rows], value[:, :, :num_rows]
        for part, old in zip(fresh, (old_key, old_value), strict=True):
            part.copy_(torch.where(keep, part, old))
        if layer in self._stages:
            seen = Layer(layer, query, fresh, self._retrieved[layer], self._within)
            self.chosen = largest(self._score(seen, self._truth), self._stages[layer], self.chosen)
        num_chosen = int(self.chosen.sum())
        self.num_computed += num_chosen + KV_SHARE * (num_begun - num_chosen)
        return key, value
