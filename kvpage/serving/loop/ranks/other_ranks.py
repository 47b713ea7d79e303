"""OtherRanks: the ranks that compute with this one, as a step sees them."""

from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpage.serving.model.step import PackedTokens


class OtherRanks(Protocol):
    """The ranks that compute the other heads of the model."""

    def computing(
        self, packed: PackedTokens, slots: npt.NDArray[np.int64], tables: npt.NDArray[np.int32]
    ) -> AbstractContextManager[None]:
        """Let the others compute the same step; inside, this rank does."""
