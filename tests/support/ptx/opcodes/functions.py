"""Roots, powers and reciprocals. A device approximates some of them; here they are rounded from fp64."""

from collections.abc import Callable

import numpy as np
from support.ptx.opcodes.elementwise import Build, elementwise
from support.ptx.source.program import Instruction


def rounded(function: Callable[[np.ndarray], np.ndarray]) -> Build:
    def apply(instruction: Instruction, kind: str, a: np.ndarray) -> np.ndarray:
        return function(a.astype(np.float64)).astype(a.dtype)

    return elementwise(apply, 1)


BUILDERS: dict[str, Build] = {
    "rcp": rounded(lambda a: 1 / a),
    "sqrt": rounded(np.sqrt),
    "rsqrt": rounded(lambda a: 1 / np.sqrt(a)),
    "ex2": rounded(np.exp2),
    "lg2": rounded(np.log2),
    "sin": rounded(np.sin),
    "cos": rounded(np.cos),
    "tanh": rounded(np.tanh),
}
