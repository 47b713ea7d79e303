"""BlendConfig: how prompts are blended in the serving loop."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpage.blend.selection import METRICS


@dataclass(frozen=True, slots=True)
class BlendConfig:
    """Frozen and validated.

    ratio: the share of a prompt's reused tokens that is computed again, 0 to 1. At 1 all of them are, which gives what
        a full prefill gives.
    check_layer: the layer that chooses them, from 0. The layers before it, and its own K and V, are computed for every
        token. At layer 0 K and V depend on nothing but the token, and the choice on nothing but rounding.
    metric: by what it chooses: how far "k", "v" or both, "kv", are from the segment's, as a mean square.
    separator: the tokens that end a segment and belong to it, for requests that do not name their segments.
    max_bytes: of the segments' K and V that are kept in host memory.
    deadline: seconds that a request waits for its segments.
    """

    ratio: float = 0.15
    check_layer: int = 1
    metric: str = "v"
    separator: Sequence[int] = ()
    max_bytes: int = 1 << 30
    deadline: float = 5.0

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, (int, float)) or not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must be in [0, 1], got {self.ratio!r}")
        for name, least in (("check_layer", 0), ("max_bytes", 1)):
            value = getattr(self, name)
            if not _is_int(value) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if not self.deadline >= 0:
            raise ValueError(f"deadline must not be negative, got {self.deadline!r}")
        if self.metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {self.metric!r}")
        object.__setattr__(self, "separator", tuple(self.separator))
        if not all(_is_int(token) for token in self.separator):
            raise ValueError(f"separator must be token ids, got {self.separator!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
