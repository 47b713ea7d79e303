"""HeldBlocks: cached blocks of one prefix in all groups, held where they are while a thread reads them.

full layers     7    2    9    4       all of the prefix
a window        .    .    5    1       those that are still there
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpage.blocks.states import Ids


@dataclass(frozen=True, slots=True, eq=False)
class HeldWindow:
    """The blocks of one window.

    Attributes:
        block_ids: By place, int32 [num_blocks], with 0 where there is none.
        has: Whether one is held, bool [num_blocks].
    """

    block_ids: Ids
    has: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class HeldBlocks:
    """Blocks of a prefix, until `release`.

    Attributes:
        num_tokens: Tokens of the prefix: whole blocks.
        block_ids: Those of full layers, int32 [num_blocks].
        windows: Those of each window.
        release: Let go of all of them; to be called once, in the manager's thread.
    """

    num_tokens: int
    block_ids: Ids
    windows: Sequence[HeldWindow]
    release: Callable[[], object]
