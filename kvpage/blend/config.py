"""BlendConfig: the configuration of blending in the serving loop."""

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
from kvpage.checks.values import as_integer, as_list, check_at_least, check_flag


@dataclass(frozen=True, slots=True)
class BlendConfig:
    """The configuration of blending, frozen and validated.

    Attributes:
        ratio: the share of a prompt's reused tokens that is computed again, 0 to 1. At 1 the result is that of a full
            prefill.
        uses_sensitivity: choose the tokens of the largest sensitivity (see SegmentKV) if their segments have it, as
            segments of Engine.warm_segments do. It costs computing them twice there, and nothing here. Other tokens are
            chosen by metric and seam. A prompt of both kinds has the same share of each.
        check_layer: the layer that chooses, from 0. The layers before it, and its own K and V, are computed for every
            token. None: 0 in prompts whose reused tokens all have a sensitivity, which are chosen before it; 1 in
            others, since K and V of layer 0 depend on the token alone and differ by rounding only. A later layer
            chooses better by the metric, but a larger ratio is the better use of the same work (`kvpage bench blend`).
        filters: (layer, ratio) of layers before a named check layer that drop tokens already (gradual filtering). Each
            keeps that share of the reused tokens, or `ratio` if it is larger; later layers do not compute the others.
            Layers rise, ratios fall. It helped only with a late check layer.
        metric: the choice without a sensitivity: mean square distance of "k", "v" or both, "kv", from the segment's.
        seam: the extra weight of the metric near a segment's begin, where the text before it has changed. At the n-th
            token its root counts 1 + seam / n. 0 for equal weights.
        separator: token ids after which segments end in requests that name none; they belong to the segment.
        boundaries: cuts such requests by contents. At most one of separator and boundaries is given.
        max_bytes: of the segments' K and V in host memory, and of segments on their way to any place. Beyond it,
            prompts' segments are not kept, and `warm_segments` waits.
        deadline: seconds that a request waits for its segments.

    Raises:
        ValueError: a field breaks a rule.
        TypeError: a field is of the wrong type.
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
            if (name, getattr(self, name)) != ("check_layer", None):
                check_at_least(name, getattr(self, name), least)
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
        """Return filters and check layer for a model.

        Args:
            num_layers: of the model.
            is_known: whether all reused tokens of a prompt have a sensitivity.

        Returns:
            The stages, the check layer last.

        Raises:
            ValueError: the model has no such check layer.
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
        """Return the segments of a prompt whose request names none.

        Args:
            tokens: int [num_tokens].

        Returns:
            The spans, in their order.

        Raises:
            ValueError: there is neither a separator nor boundaries.
        """
        tokens = as_tokens(tokens)
        if self.boundaries:
            ends = self.boundaries.cuts(tokens)[:-1]  # the text after the last boundary goes on in other prompts
            return [Span(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        if not self.separator:
            raise ValueError("segments must be given where BlendConfig has neither separator nor boundaries")
        return spans_by_separator(tokens, self.separator)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
