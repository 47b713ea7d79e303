"""Modes of torch that a call must not pass by: those that want to see every operator of torch.

no mode                      native calls compute, operators of torch are left out
a TransparentMode, alone     the same: it asks for nothing but the operators that torch itself computes
any other                    operators of torch only, so that the mode sees them
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class TransparentMode(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it
    """A mode under which native calls compute as they do without one."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Have torch call `__torch_dispatch__` without its guard against torch.compile, dearer than an operator."""
        return False


def is_dispatch_watched() -> bool:
    """Return whether a mode other than one TransparentMode is active in this thread."""
    depth = torch._C._len_torch_dispatch_stack()
    return depth > 0 and not (depth == 1 and isinstance(torch._C._get_dispatch_stack_at(0), TransparentMode))


def unseen() -> AbstractContextManager[object]:
    """Return a context whose operators a TransparentMode does not see, where it is the only mode."""
    guard: AbstractContextManager[object] = nullcontext() if is_dispatch_watched() else torch._C._DisableTorchDispatch()
    return guard
