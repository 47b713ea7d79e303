"""SampledSequence: a sequence whose next token is chosen, as the samplers see it."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpage.serving.params.sampling import SamplingParams
from kvpage.serving.sampling.sampled_row import SampledRow


class SampledSequence(Protocol):
    """A request, as the samplers see it."""

    @property
    def request_id(self) -> str:
        """The name of the sequence in errors."""

    @property
    def params(self) -> SamplingParams:
        """The rules of the choice."""

    @property
    def sampled_row(self) -> SampledRow | None:
        """The rules as arrays; None where the likeliest token is taken as it is."""

    @property
    def seed(self) -> int:
        """The seed of the draws, in [0, 2**63)."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The prompt and the generated tokens, then room for more."""

    @property
    def num_tokens(self) -> int:
        """The length of the prompt and the generated tokens together."""

    @property
    def num_generated(self) -> int:
        """The number of generated tokens, the position of the next draw."""
