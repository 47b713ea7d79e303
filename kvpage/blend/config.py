"""BlendConfig: how prompts are blended in the serving loop."""

import numbers
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpage.blend.boundaries import ContentBoundaries
from kvpage.blend.selection import METRICS, SEAM, Stage, check_filters, check_seam
from kvpage.blend.spans import Span, spans_by_separator
from kvpage.checks.tensors import as_ratio
from kvpage.checks.tokens import as_tokens
from kvpage.checks.values import as_integer, as_list, check_flag


@dataclass(frozen=True, slots=True)
class BlendConfig:
    """Frozen and validated.

    ratio: the share of a prompt's reused tokens that is computed again, 0 to 1. At 1 all of them are, which gives what
        a full prefill gives.
    uses_sensitivity: choose those of the largest sensitivity (see SegmentKV) where the segments know it, as those do
        that Engine.warm_segments computes; it costs computing them twice there, and nothing here. The others are chosen
        by metric and seam. In a prompt of both kinds the same share of each is.
    check_layer: the layer that chooses them, from 0. The layers before it, and its own K and V, are computed for every
        token. None for 0 in prompts whose reused tokens all have a sensitivity: they are chosen before it; and for 1 in
        others: at layer 0 K and V depend on nothing but the token, and what the metric sees is nothing but rounding.
        For the metric a later one chooses better, but a larger ratio is the better use of the same work
        (`kvpage bench blend`).
    filters: (layer, ratio) of layers before a check layer that is named, which let go of tokens already (gradual
        filtering): each keeps that share of the reused ones, or `ratio` where it is larger, and what it lets go is not
        computed behind it. Layers rise, ratios fall. It helped only where the check layer stood far behind.
    metric: by what they choose without a sensitivity: how far "k", "v" or both, "kv", are from the segment's, as a mean
        square.
    seam: how much more the metric counts near a segment's begin, where what stood before it is not what stands there
        now: at the n-th token the root of it counts 1 + seam / n. 0 for all alike.
    separator, boundaries: where the segments of requests end that do not name them: behind the separator's tokens,
        which belong to the segment, or where the text itself says. At most one of them.
    max_bytes: of the segments' K and V that are kept in host memory; and of those, wherever they are kept, that are on
        their way there: beyond it, prompts' segments are not kept, and `warm_segments` waits.
    deadline: seconds that a request waits for its segments.
    """

    ratio: float = 0.15
    check_layer: int | None = None
    metric: str = "v"
    filters: Sequence[tuple[int, float]] = ()
    seam: float = SEAM
    separator: Sequence[int] = ()
    boundaries: ContentBoundaries | None = None
    max_bytes: int = 1 << 30
    deadline: float = 5.0
    uses_sensitivity: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", as_ratio("ratio", self.ratio))
        check_flag("uses_sensitivity", self.uses_sensitivity)
        for name, least in (("check_layer", 0), ("max_bytes", 1)):
            value = getattr(self, name)
            if (name, value) != ("check_layer", None) and (not _is_int(value) or value < least):
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        filters = as_list("filters", self.filters)
        if filters and self.check_layer is None:
            raise ValueError(f"filters must be empty without a check_layer, got {self.filters!r}")
        object.__setattr__(self, "filters", check_filters(filters, self.check_layer or 0, 0))
        object.__setattr__(self, "seam", check_seam(self.seam))
        if not isinstance(self.deadline, numbers.Real) or not self.deadline >= 0:
            raise ValueError(f"deadline must not be negative, got {self.deadline!r}")
        if not isinstance(self.metric, str) or self.metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {self.metric!r}")
        object.__setattr__(self, "separator", tuple(as_list("separator", self.separator)))
        if not all(_is_int(token) for token in self.separator):
            raise ValueError(f"separator must be token ids, got {self.separator!r}")
        if self.boundaries is not None and not isinstance(self.boundaries, ContentBoundaries):
            raise TypeError(f"boundaries must be ContentBoundaries, got {type(self.boundaries).__name__}")
        if self.separator and self.boundaries:
            raise ValueError("boundaries must be None with a separator")

    def stages_of(self, num_layers: int, is_known: bool = False) -> tuple[Stage, ...]:
        """Filters and check layer of a model of so many layers. is_known: a prompt's reused tokens have a sensitivity.
        ValueError for a check layer that the model has not.
        """
        num_layers = as_integer("num_layers", num_layers)
        check_flag("is_known", is_known)
        if num_layers < 1:
            raise ValueError(f"num_layers must be positive, got {num_layers}")
        if self.check_layer is None:
            return (Stage(0 if is_known else min(1, num_layers - 1), self.ratio),)
        if self.check_layer >= num_layers:
            raise ValueError(f"check_layer must be under {num_layers}, got {self.check_layer}")
        filters = (Stage(layer, max(ratio, self.ratio)) for layer, ratio in self.filters)
        return (*filters, Stage(self.check_layer, self.ratio))

    def spans(self, tokens: npt.NDArray[np.int32]) -> list[Span]:
        """The segments of a prompt whose request names none. ValueError without separator and boundaries."""
        tokens = as_tokens(tokens)
        if self.boundaries:
            ends = self.boundaries.cuts(tokens)[:-1]  # what is behind the last boundary goes on in other prompts
            return [Span(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        if not self.separator:
            raise ValueError("segments must be given where BlendConfig has neither separator nor boundaries")
        return spans_by_separator(tokens, self.separator)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
