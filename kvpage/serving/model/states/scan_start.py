"""ScannedForward: the forward of a Mamba mixer's copy, whose scan begins with the state that came before.

The scan of transformers begins from zero, as the kernels do that it stands for. It is linear, so what a state h before
the tokens adds is known without it:

    state after t tokens      scan + exp(A * (dt_1 + ... + dt_t)) * h
    output of token t         scan + C_t · (that) * silu(z_t)

A mixer calls the scan by a name of its own file. The copy's forward is the same code, for which this name means the
scan and what is added. See RotaryForward.
"""

from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from kvpage.cache.state_cache import StateKey
from kvpage.serving.model.meaning import innermost, with_meaning
from kvpage.serving.model.native.trial import random_rows, relative_error
from kvpage.serving.model.states.mixer import StateMixer
from kvpage.serving.model.states.piece_cache import PieceCache

NAME = "mamba_selective_scan"
SLAB = 64  # tokens whose decays are in memory at once
MAX_ERROR = 1e-5  # of fp32 numbers, relative


class ScannedForward:
    """The forward of one copy. `is_current` tells whether its class has the forward still that this was made of."""

    def __init__(self, copy: nn.Module, key: StateKey, own: FunctionType, scan: Callable[..., Any]) -> None:
        self._copy, self._key, self._own, self._scan = copy, key, own, scan
        self._starts: Iterator[torch.Tensor] = iter(())
        forward = with_meaning(own, NAME, self._scan_from)
        assert forward is not None, "`of` has tried it"
        self._forward = MethodType(forward, copy)

    @property
    def is_current(self) -> bool:
        current: Any = type(self._copy).forward
        return current is self._own

    def compute(self, cache: PieceCache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the forward for a piece. cache: also among the arguments."""
        layer, _, index = self._key
        state = cache.get_recurrent_state(layer, index)
        # The state is [n, channels, size], or has heads before the channels. Each head has a scan, in their order.
        self._starts = iter(() if state is None else [state] if state.dim() == 3 else state.unbind(1))
        return self._forward(*args, **kwargs)

    def _scan_from(self, *args: Any, **kwargs: Any) -> Any:
        start = next(self._starts, None)
        return self._scan(*args, **kwargs) if start is None else _continued(self._scan, start, *args, **kwargs)

    @classmethod
    def of(cls, mixer: StateMixer, copy: nn.Module) -> "ScannedForward | None":
        """Return the forward for a copy of the mixer's module; None if its class calls no such scan."""
        module, keys = mixer.module, [key for key in mixer.keys if key[1] == "recurrent"]
        forward: Any = type(module).forward
        inner = innermost(forward, NAME)
        if "forward" in vars(module) or inner is None or len(keys) != 1:
            return None
        scan = inner.__globals__.get(NAME)
        if not callable(scan) or with_meaning(forward, NAME, scan) is None:
            return None
        device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
        return cls(copy, keys[0], forward, scan) if _goes_on(scan, device) else None


def _continued(
    scan: Callable[..., Any],
    start: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [n, channels, tokens] and the last state of a scan that begins with `start`.

    The arguments are those of the scan: hidden_states, dt and z [n, channels, tokens], A [channels, size], B and C
    [n, size, tokens].
    """
    named = {**kwargs, "z": z, "delta_bias": delta_bias, "delta_softplus": delta_softplus, "return_last_state": True}
    outputs, last = scan(hidden_states, dt, A, B, C, **named)
    steps = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    steps = (nn.functional.softplus(steps) if delta_softplus else steps).float()
    added, left = _decayed(start.float(), steps, A.float(), C.float())
    added = added if z is None else added * nn.functional.silu(z.float())
    return (outputs + added).to(outputs.dtype), last + left


def _decayed(
    state: torch.Tensor, steps: torch.Tensor, A: torch.Tensor, C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a state adds to each output, [n, channels, tokens], and what is left of it after the last token."""
    added = []
    for begin in range(0, steps.shape[2], SLAB):
        slab = slice(begin, begin + SLAB)
        decays = torch.exp(A[:, None] * steps[:, :, slab].cumsum(2)[..., None])
        states = decays * state[:, :, None]
        added.append(torch.einsum("ncts,nst->nct", states, C[:, :, slab]))
        state = states[:, :, -1]
    return torch.cat(added, dim=2), state


def _goes_on(scan: Callable[..., Any], device: torch.device) -> bool:
    """Try the function out: a scan in two parts must be the scan."""
    hidden, dt, z = random_rows(3, 2, 4, 7).to(device)
    B, C = random_rows(2, 2, 3, 7).to(device)
    A, bias = -random_rows(4, 3).abs().to(device), random_rows(4).to(device)
    named: dict[str, Any] = {"delta_bias": bias, "delta_softplus": True}
    named |= {"D": random_rows(4).to(device), "return_last_state": True}
    parts = slice(0, 3), slice(3, 7)
    try:
        with torch.no_grad():
            expected = scan(hidden, dt, A, B, C, z=z, **named)
            arguments = [(*(x[..., part] for x in (hidden, dt)), A, *(x[..., part] for x in (B, C))) for part in parts]
            first, start = scan(*arguments[0], z=z[..., parts[0]], **named)
            second, last = _continued(scan, start, *arguments[1], z=z[..., parts[1]], **named)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):  # it takes other arguments
        return False
    pairs = (torch.cat([first, second], dim=2), expected[0]), (last, expected[1])
    return all(relative_error(result.cpu(), reference.cpu()) <= MAX_ERROR for result, reference in pairs)
