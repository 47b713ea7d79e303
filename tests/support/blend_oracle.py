"""Blending in plain torch, as the definition has it: every row of every layer is computed, nothing is narrowed; after
the check layer the K and V of reused rows that were not chosen are overwritten by those of their segments, which were
computed where they now stand, so that nothing has to be turned. With filters several layers choose, each among what the
one before has left. Rows of segments that know their sensitivity are chosen by it; rows of both kinds by their rank
among those of their kind.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
import transformers as tf

from kvpage.blend.selection import SEAM


@dataclass
class Place:
    """A segment reused at `start` of a prompt, from its token `begin` on.

    k, v: per layer [kv heads, num_tokens, size], at those positions. sensitivity: of each token, or None.
    """

    start: int
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    begin: int = 0
    sensitivity: list[float] | None = None

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.k[0].shape[1])


@dataclass
class Recorder:
    """The attention of one forward pass, with the rows that it has seen."""

    places: list[Place] = field(default_factory=list)
    ratio: float = 0.0
    check_layer: int = 0
    metric: str = "v"
    filters: tuple[tuple[int, float], ...] = ()
    seam: float = SEAM
    k: list[torch.Tensor] = field(default_factory=list)
    v: list[torch.Tensor] = field(default_factory=list)
    chosen: set[int] | None = None

    def attend(self, module, query, key, value, mask, scaling=None, sliding_window=None, softcap=None, s_aux=None, **_):  # noqa: ANN001
        layer = module.layer_idx
        self.k.append(key[0])
        self.v.append(value[0])
        whole = key[0], value[0]
        if layer == 0:
            self.chosen = None
        if self.chosen is not None:
            key, value = (
                self._mixed(key, [one.k[layer] for one in self.places]),
                self._mixed(value, [one.v[layer] for one in self.places]),
            )
        ratios = {layer: max(ratio, self.ratio) for layer, ratio in self.filters} | {self.check_layer: self.ratio}
        if layer in ratios and self.places:
            self.chosen = self._choose(*whole, layer, ratios[layer])
        return _attention(query, key, value, scaling, sliding_window, softcap, s_aux), None

    def _choose(self, key: torch.Tensor, value: torch.Tensor, layer: int, ratio: float) -> set[int]:
        num_tokens, deviation, is_known = key.shape[1], {}, {}
        for one in self.places:
            for offset, row in enumerate(range(one.rows.start, one.rows.stop)):
                parts = {"k": (key[:, row], one.k[layer][:, offset]), "v": (value[:, row], one.v[layer][:, offset])}
                found = sum(float((a - b).square().mean()) for a, b in (parts[name] for name in self.metric))
                deviation[row] = found * (1 + self.seam / (1 + one.begin + offset)) ** 2
                is_known[row] = one.sensitivity is not None
                if is_known[row]:
                    deviation[row] = one.sensitivity[offset]
        count = max(1, int(len(deviation) * ratio)) if ratio else 0
        left = [row for row in deviation if self.chosen is None or row in self.chosen]
        share = {}
        for kind in (True, False):
            ranked = sorted((row for row in left if is_known[row] == kind), key=lambda row: (-deviation[row], row))
            share |= {row: place / len(ranked) for place, row in enumerate(ranked)}
        best = sorted(left, key=lambda row: (share[row], row))[:count]
        return {*best, *(set(range(num_tokens)) - set(deviation)), num_tokens - 1}

    def _mixed(self, fresh: torch.Tensor, retrieved: list[torch.Tensor]) -> torch.Tensor:
        mixed = fresh.clone()
        for one, rows in zip(self.places, retrieved, strict=True):
            for offset, row in enumerate(range(one.rows.start, one.rows.stop)):
                if row not in self.chosen:
                    mixed[0, :, row] = rows[:, offset]
        return mixed


def _attention(query, key, value, scaling, window, softcap, sinks):  # noqa: ANN001, ANN202
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(query.shape[2])
    visible = at[None] <= at[:, None]
    if window is not None:
        visible &= at[None] > at[:, None] - window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


def run(model: tf.PreTrainedModel, tokens: list[int], start: int, recorder: Recorder) -> torch.Tensor:
    """Return the last token's logits, where the first token is at position `start`."""
    tf.AttentionInterface.register("blend_oracle", partial(Recorder.attend, recorder))
    before = model.config._attn_implementation
    model.set_attn_implementation("blend_oracle")
    try:
        positions = torch.arange(start, start + len(tokens))[None]
        with torch.no_grad():
            return model(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False).logits[0, -1]
    finally:
        model.set_attn_implementation(before)


def place(
    model: tf.PreTrainedModel, context: list[int], tokens: list[int], start: int, is_measured: bool = True
) -> Place:
    """A segment computed after a context (none: standalone), as it would be if it were at `start` of a prompt.
    is_measured: its sensitivity is known, if it is standalone."""
    recorder = Recorder(check_layer=10**6)
    run(model, context + tokens, start - len(context), recorder)
    some = slice(len(context), None)
    known = sensitivity(model, tokens) if is_measured and not context else None
    return Place(start, [k[:, some] for k in recorder.k], [v[:, some] for v in recorder.v], 0, known)


def sensitivity(model: tf.PreTrainedModel, tokens: list[int]) -> list[float]:
    """Return V's change of each token after the same tokens, a mean square over that of all; the mean over layers."""
    recorder, size = Recorder(check_layer=10**6), len(tokens)
    run(model, tokens + tokens, 0, recorder)
    each = [(v[:, size:] - v[:, :size]).square().mean((0, 2)) / v[:, :size].square().mean() for v in recorder.v]
    return torch.stack(each).mean(0).tolist()


def pad(rows: torch.Tensor, size: int) -> torch.Tensor:
    return F.pad(rows, (0, size - rows.shape[-1]))
