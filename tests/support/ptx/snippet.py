"""Snippets: a few instructions between loads of their inputs and stores of their results, one number a thread."""

from collections.abc import Sequence

import numpy as np
from support.ptx.kernel import Kernel

NAMES = "abcd"  # %a to %d hold the inputs, %o0, %o1, ... take the results


def snippet(text: str, inputs: Sequence[np.dtype], outputs: Sequence[np.dtype], declarations: str = "") -> str:
    """Return a module whose entry runs the text in each thread of a block."""
    places = [(NAMES[i], dtype) for i, dtype in enumerate(inputs)] + [(f"o{i}", d) for i, d in enumerate(outputs)]
    parameters = ", ".join(f".param .u64 p_{name}" for name, _ in places)
    registers = "".join(f".reg .b{_register_bits(d)} %{name}; .reg .b64 %at_{name};\n" for name, d in places)
    addresses = "".join(
        f"ld.param.u64 %at_{name}, [p_{name}];\nmad.wide.u32 %at_{name}, %t, {d.itemsize}, %at_{name};\n"
        for name, d in places
    )
    loads = "".join(f"ld.global.b{8 * d.itemsize} %{n}, [%at_{n}];\n" for n, d in places[: len(inputs)])
    stores = "".join(f"st.global.b{8 * d.itemsize} [%at_{n}], %{n};\n" for n, d in places[len(inputs) :])
    common = ".reg .b32 %t, %u, %v; .reg .b64 %w; .reg .pred %p, %q;\nmov.u32 %t, %tid.x;\n"
    body = "".join([common, registers, declarations, addresses, loads, text, "\n", stores])
    return f".version 8.0\n.target sm_90\n.visible .entry snippet({parameters})\n{{\n{body}ret;\n}}\n"


def _register_bits(dtype: np.dtype) -> int:
    return max(8 * dtype.itemsize, 16)


def run_snippet(
    text: str,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[type],
    declarations: str = "",
    shared: int = 0,
    finds_races: bool = True,
) -> list[np.ndarray]:
    """Run the text in a thread for each number of the inputs, which fill whole warps, and return its results."""
    count = len(inputs[0])
    block = -(-count // 32) * 32
    padded = [np.resize(each, block) for each in inputs]
    results = [np.zeros(block, dtype) for dtype in outputs]
    kernel = Kernel(snippet(text, [each.dtype for each in padded], [each.dtype for each in results], declarations))
    arrays = [*padded, *results]
    regions = [(each.ctypes.data, each.nbytes) for each in arrays]
    given = kernel.pack([each.ctypes.data for each in arrays])
    kernel.launch((1, 1, 1), block, given, regions, shared, finds_races=finds_races)
    return [each[:count] for each in results]
