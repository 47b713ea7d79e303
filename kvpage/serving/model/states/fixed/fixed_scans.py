"""FixedForward: the forward of a mixer's copy, whose scans compute token by token, in prompts as in answers.

    transformers   a prompt by chunks, from where a portion begins; a token of an answer by a formula of its own
    here           both by one recurrence of the C++ core: a token's bits depend on the tokens before it alone

A mixer calls its scans by names of its own file. The copy's forward is the same code, in which these names mean the
scans here. All compute in fp32, and take what the scans of transformers take. Their operators give a row the same bits
in every batch as they come, so that none is looked at: see RowBits. Convolutions are found in the same way.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from kvpage.cache.state_cache import StateKey
from kvpage.ops.args.dispatch_modes import unseen
from kvpage.ops.cpu.recurrence import recurrence
from kvpage.serving.model.meaning import innermost, with_meaning
from kvpage.serving.model.native.bits.functional_forward import NAME, Functional
from kvpage.serving.model.native.bits.row_bits import RowBits
from kvpage.serving.model.native.bits.whole_vectors import of_elements
from kvpage.serving.model.states.fixed.fixed_convolutions import CONVOLUTIONS, convolution_names
from kvpage.serving.model.states.fixed.scan_names import scan_names
from kvpage.serving.model.states.mixer import StateMixer, limits_of
from kvpage.serving.model.states.piece_cache import PieceCache

EPS = 1e-6  # of the norm of keys


class FixedForward:
    """The forward of one copy. bits: of the view; the `caller` of their threads is how many compute."""

    def __init__(self, mixer: StateMixer, copy: Any, bits: RowBits) -> None:
        self._copy, self._bits, self._key = copy, bits, _recurrent_key(mixer)
        self._limits = limits_of(mixer.module)
        self._starts: Iterator[torch.Tensor] = iter(())
        self._own: Any = type(copy).forward
        forward = self._own
        for name in scan_names(mixer.module):
            forward = with_meaning(forward, name, partial(self._native, SCANS[name], self))
        for name in convolution_names(forward):
            forward = with_meaning(forward, name, partial(self._native, CONVOLUTIONS[name]))
        if innermost(forward, NAME) is not None:
            forward = with_meaning(forward, NAME, Functional(bits.threads))
        assert type(forward) is FunctionType, "the mixer is fixed"
        self._forward = MethodType(forward, copy)

    def compute(self, cache: PieceCache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the forward for a piece. cache: also among the arguments. ValueError for another forward than at load.

        Scans of Mamba are not given the state. It is [n, channels, size], or has heads before the channels, each of
        which has a scan, in their order.
        """
        if type(self._copy).forward is not self._own:
            raise ValueError(f"the forward of {type(self._copy).__name__} must be that of its class, as at load")
        layer, _, index = self._key
        state = cache.get_recurrent_state(layer, index)
        self._starts = iter(() if state is None else [state] if state.dim() == 3 else state.unbind(1))
        return self._forward(*args, **kwargs)

    def _native(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._bits.next_part()
        with unseen():
            return function(*args, **kwargs)

    @property
    def _num_threads(self) -> int:
        return self._bits.threads.caller or torch.get_num_threads()

    def _delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int = 0,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """query, key [n, tokens, key heads, keys], value [n, tokens, heads, size]; g the decays, of heads or keys."""
        dtype = query.dtype
        query, key, value, g, beta = (x.float() for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = _normalized(query), _normalized(key)
        query = query * query.shape[-1] ** -0.5
        shape = query.shape[0], value.shape[2], query.shape[3], value.shape[3]
        state = query.new_zeros(shape) if initial_state is None else initial_state.float()
        out = recurrence(query, key, value, g, state, factor=beta, num_threads=self._num_threads)
        return out.to(dtype), state if output_final_state else None

    def _scan_of_heads(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int = 0,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] | None = None,
        return_final_states: bool = False,
        **_: Any,
    ) -> Any:
        """hidden_states [n, tokens, heads, size], dt [n, tokens, heads], A [heads], B, C [n, tokens, groups, keys]."""
        x = hidden_states.float()
        steps = _steps(dt, dt_bias, dt_softplus).clamp(*(self._limits if dt_limit is None else dt_limit))
        shape = x.shape[0], *x.shape[2:], B.shape[3]
        state = x.new_zeros(shape) if initial_states is None else initial_states.float()
        out = recurrence(
            C.float(),
            B.float(),
            x * steps[..., None],
            steps * A.float(),
            state.transpose(2, 3),
            num_threads=self._num_threads,
        )
        out = out if D is None else out + x * D.float()[:, None]
        return (out, state) if return_final_states else out

    def _step_of_heads(
        self,
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        z: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """state [n, heads, size, keys], hidden_states [n, heads, size]; dt, A, D and dt_bias for each element."""
        out, after = self._scan_of_heads(
            hidden_states[:, None],
            dt[:, None, :, 0],
            A[:, 0, 0],
            B[:, None],
            C[:, None],
            D=None if D is None else D[:, 0],
            dt_bias=None if dt_bias is None else dt_bias[:, 0],
            initial_states=state,
            dt_softplus=dt_softplus,
            return_final_states=True,
        )
        _keep(state, after)
        result: torch.Tensor = out[:, 0]
        return result if z is None else result * of_elements(nn.functional.silu, z)  # as models do after a scan

    def _scan_of_channels(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: Any,
    ) -> Any:
        """hidden_states, dt, z [n, channels, tokens], A [channels, keys], B, C [n, keys, tokens], D [channels]."""
        start = next(self._starts, None)
        shape = hidden_states.shape[0], *A.shape
        state = hidden_states.new_zeros(shape, dtype=torch.float32) if start is None else start.float()
        x, steps, keys, queries = (part.transpose(1, 2) for part in (hidden_states, dt, B, C))
        gate = None if z is None else z.transpose(1, 2)
        out = self._pass_channels(state, x, steps, A, keys, queries, D, gate, delta_bias, delta_softplus)
        out = out.transpose(1, 2)
        return (out, state) if return_last_state else out

    def _step_of_channels(
        self,
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        z: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """state [n, channels, keys], hidden_states, dt, z [n, channels], B, C [n, keys]."""
        x, steps, keys, queries = (part[:, None] for part in (hidden_states, dt, B, C))
        gate = None if z is None else z[:, None]
        after = state.float()
        out = self._pass_channels(after, x, steps, A, keys, queries, D, gate, dt_bias, dt_softplus)
        _keep(state, after)
        return out[:, 0]

    def _pass_channels(
        self,
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        z: torch.Tensor | None,
        bias: torch.Tensor | None,
        softplus: bool,
    ) -> torch.Tensor:
        """Return the outputs [n, tokens, channels]; all but A, D and bias by token."""
        x, steps = hidden_states.float(), _steps(dt, bias, softplus)
        out = recurrence(
            C.float().unsqueeze(2),
            B.float().unsqueeze(2),
            (x * steps).unsqueeze(2),
            steps.unsqueeze(2),
            state.transpose(1, 2).unsqueeze(1),
            rates=A.float().t().unsqueeze(0),
            num_threads=self._num_threads,
        ).squeeze(2)
        out = out if D is None else out + x * D.float()
        return out if z is None else out * of_elements(nn.functional.silu, z.float())


SCANS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": FixedForward._delta_rule,
    "torch_recurrent_gated_delta_rule": FixedForward._delta_rule,
    "chunk_kimi_delta_attention": FixedForward._delta_rule,
    "recurrent_kimi_delta_attention": FixedForward._delta_rule,
    "mamba_selective_scan": FixedForward._scan_of_channels,
    "mamba_selective_state_update": FixedForward._step_of_channels,
    "mamba2_chunk_scan": FixedForward._scan_of_heads,
    "mamba2_selective_state_update": FixedForward._step_of_heads,
}
"""By the names that mixers call them by."""


def _recurrent_key(mixer: StateMixer) -> StateKey:
    (key,) = (key for key in mixer.keys if key[1] == "recurrent")
    return key


def _normalized(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.contiguous()
    return rows / (rows * rows).sum(-1, keepdim=True).add(EPS).sqrt()


def _steps(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    """Return the time steps [..., channels or heads]."""
    steps = dt.float() if bias is None else dt.float() + bias.float()
    return of_elements(nn.functional.softplus, steps) if softplus else steps


def _keep(state: torch.Tensor, after: torch.Tensor) -> None:
    """Have the state after a step in its place, where `after` is a copy: of states that are not in fp32."""
    if after.data_ptr() != state.data_ptr():
        state.copy_(after)
