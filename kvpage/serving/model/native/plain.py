"""Whether torch would do nothing with a call but compute it: then an operation of kvpage may stand in for it.

no gradient, no tracing, no mode of torch, no autocast, no transform of torch.func, no forward-mode derivative
tensors of no subclass, on the device asked for, of one float dtype
no hooks, no forward of its own, no compiled call        of modules that a fused operation leaves out
"""

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as of_all

from kvpage.ops.args.dispatch_modes import is_dispatch_watched

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def is_plain_call(rows: torch.Tensor, device_type: str = "cpu") -> bool:
    """Return whether a layer that is called with `rows`, now, has only to compute.

    device_type: where the rows must be, "cpu" or "cuda". All is one expression, since a step asks this some ten times
    a layer.
    """
    return (
        type(rows) is torch.Tensor
        and (rows.is_cpu if device_type == "cpu" else rows.is_cuda)
        and rows.dtype in DTYPES
        and rows.layout is torch.strided
        and not rows.is_neg()
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(device_type)
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and (torch._C._len_torch_dispatch_stack() == 0 or not is_dispatch_watched())
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )


def is_unwatched(module: nn.Module) -> bool:
    """Return whether a call of the module is its class's forward, and nothing else."""
    attributes = vars(module)
    return not (
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or of_all._global_forward_hooks
        or of_all._global_forward_pre_hooks
        or of_all._global_backward_hooks
        or of_all._global_backward_pre_hooks
        or "forward" in attributes
        or attributes.get("_compiled_call_impl") is not None
    )


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for those of inference mode, which do not count it."""
    return 0 if tensor.is_inference() else tensor._version
