"""Tokens through linear recurrences, one by one, by the C++ core: gated delta rules, and the scans of Mamba.

    S = S * exp(decay) + key ⊗ u           u = value, or factor * (value - key @ (S * exp(decay))), the delta rule
    out = query @ S

What a token gives is the same, bit by bit, whichever tokens are computed with it. All is in fp32.
"""

import torch

import kvpage._C as _C
from kvpage.checks.tensors import check_plain, check_writable

OF_HEAD, OF_KEY, OF_ELEMENT = range(3)


def recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor,
    *,
    factor: torch.Tensor | None = None,
    rates: torch.Tensor | None = None,
    num_threads: int,
) -> torch.Tensor:
    """Pass tokens through the recurrence of each sequence and head. `state` becomes that after the last token.

    Args:
        query: [num_sequences, num_tokens, num_key_heads, num_keys]. num_heads / num_key_heads heads read each of them.
        key: The same.
        value: [num_sequences, num_tokens, num_heads, num_columns].
        decay: What states decay by, as the powers of e, each 0 or less. [num_sequences, num_tokens, num_heads], with
            num_keys as a fourth size for each key, or with `rates` as value.
        state: [num_sequences, num_heads, num_keys, num_columns], of any strides.
        factor: [num_sequences, num_tokens, num_heads] of the delta rule; None to add values as they are.
        rates: [num_heads, num_keys, num_columns], each times the decay of its column; None for decays of heads or keys.
        num_threads: How many threads may compute.

    Returns:
        As value.

    Raises:
        ValueError: A tensor is not fp32 in host memory, or of another shape.
        TypeError: An argument is of another type.
    """
    kind = _check(query, key, value, decay, state, factor, rates)
    num_sequences, num_tokens, num_key_heads, num_keys = query.shape
    num_heads, num_columns = value.shape[2:]
    query, key, value, decay = (tensor.contiguous() for tensor in (query, key, value, decay))
    rates, factor = (None if tensor is None else tensor.contiguous() for tensor in (rates, factor))
    out = value.new_empty(value.shape)  # torch's default dtype may be another
    _C.recurrence(
        (
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            decay.data_ptr(),
            0 if rates is None else rates.data_ptr(),
            0 if factor is None else factor.data_ptr(),
            out.data_ptr(),
        ),
        (state.data_ptr(), state.stride(0), state.stride(1), state.stride(2), state.stride(3)),
        (num_sequences, num_tokens, num_key_heads, num_heads, num_keys, num_columns),
        kind,
        num_threads,
    )
    return out


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor,
    factor: torch.Tensor | None,
    rates: torch.Tensor | None,
) -> int:
    """Raise unless all fit together, and return what decays are of."""
    for name, tensor in (("query", query), ("value", value), ("decay", decay)):
        check_plain(name, tensor)
    check_writable("state", state)
    num_sequences, num_tokens, _, num_keys = query.shape
    num_heads, num_columns = value.shape[2:]
    kind = OF_ELEMENT if rates is not None else OF_KEY if decay.dim() == 4 else OF_HEAD
    rows, of_state = (num_sequences, num_tokens, num_heads), (num_heads, num_keys, num_columns)
    _check_shape("query", query, tuple(query.shape))
    _check_shape("key", key, tuple(query.shape))
    _check_shape("value", value, (*rows, num_columns))
    _check_shape("decay", decay, (*rows, *((), (num_keys,), (num_columns,))[kind]))
    _check_shape("state", state, (num_sequences, *of_state))
    if factor is not None:
        _check_shape("factor", factor, rows)
    if rates is not None:
        _check_shape("rates", rates, of_state)
    return kind


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    check_plain(name, tensor)
    if tensor.dtype != torch.float32 or not tensor.is_cpu or tensor.shape != shape:
        description = f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        raise ValueError(f"{name} must be {shape} of torch.float32 on a CPU, got {description}")
