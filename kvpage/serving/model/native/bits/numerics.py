"""The name of what bits depend on besides model and tokens: two processes of one name compute the same bits."""

import torch
import transformers

import kvpage._C as _C

VERSION = 3
"""Grows with every change of a native operation that changes a bit of a result."""


def numerics_name() -> str:
    """Return the name for this machine and these packages: for example
    "3 avx512bf16 torch 2.13.0 AVX512 transformers 5.24.0".

    Returns:
        The version of kvpage's arithmetic, the instruction set of its products, the version of torch, the instruction
        set of torch's operators, and the version of the models' code.
    """
    native = _products()
    of_torch = torch.backends.cpu.get_cpu_capability()
    return f"{VERSION} {native} torch {torch.__version__} {of_torch} transformers {transformers.__version__}"


def _products() -> str:
    """Return the instruction set of products; of AMX with a digest where its tiles add up in an order of their own."""
    best = _C.linear_kernels()[0]
    return _C.product_tiles()[0] if best == "amx" else best
