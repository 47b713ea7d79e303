"""Hostile values: what a caller passes by mistake, or on purpose, in place of what a function asks for.

    hostile(value, rng) ─► something of the same kind that is wrong somewhere, or of another kind altogether

Never an address that is not one: what memory a call reads and writes by itself is its own to get right.
"""

import array
import decimal
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

HUGE = (2**15, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), -(2**63) - 1, 10**30)
INTEGERS = (-1, 0, 1, 2, 3, 7, 8, 9, -2, *HUGE)
FLOATS = (math.nan, math.inf, -math.inf, -0.0, 0.5, -1.0, 1e-320, 1e38, 1e308, 1.0)
TEXTS = ("", "x", "auto", "cuda", "cuda:9", "meta", "fp8", "\udc80", "é", "a" * 5000, "../..", "%s", "\0", "-1", "1e9")
DTYPES = tuple(
    getattr(torch, name)
    for name in [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "float8_e4m3fn",
    ]
)


class NoIndex:
    """Raises where it is asked to be a number or a sequence."""

    def __index__(self) -> int:
        raise TypeError("no index")

    def __len__(self) -> int:
        raise TypeError("no length")


def as_integers(values: list[int], rng: random.Random) -> Any:
    """The same numbers in one of the forms that are taken."""
    forms = (
        list,
        lambda v: np.array(v, np.int32),
        lambda v: np.array(v, np.int64),
        lambda v: torch.tensor(v, dtype=torch.int32),
    )
    return rng.choice(forms)(values)


def junk(rng: random.Random) -> Any:
    """Anything at all."""
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: rng.choice((True, False)),
        lambda: rng.choice(INTEGERS),
        lambda: rng.choice(FLOATS),
        lambda: rng.choice(TEXTS),
        lambda: rng.choice((b"", b"x", b"\0" * 100, bytearray(b"x"), memoryview(b"xyz"))),
        lambda: rng.choice(([], (), {}, set(), [None], ["x"], [[1, 2], [3]], [[]], range(3), {"x": 1}, [True, 2**70])),
        lambda: rng.choice((object(), int, len, NoIndex(), Ellipsis, NotImplemented, 1j, decimal.Decimal(1))),
        lambda: rng.choice((np.int64(-1), np.float32(np.nan), np.bool_(True), np.array(3), np.zeros((2, 2)))),
        lambda: rng.choice((np.array(["x"]), np.array([None]), np.array([2**63], np.uint64), np.array([], np.int32))),
        lambda: with_number(torch.arange(4), rng),  # one that torch can print: messages show what they were given
    )
    return rng.choice(kinds)()


def hostile(value: Any, rng: random.Random) -> Any:
    """`value` made wrong somewhere; or something else altogether, one time in four."""
    if rng.random() < 0.25:
        return junk(rng)
    for kind, make in _MAKERS:
        if isinstance(value, kind):
            return make(value, rng)
    return junk(rng)


def integer_like(value: int, rng: random.Random) -> Any:
    return rng.choice((rng.choice(INTEGERS), value + 1, value - 1, -value, float(value), str(value), np.int32(7), None))


def float_like(value: float, rng: random.Random) -> Any:
    return rng.choice((rng.choice(FLOATS), -value, str(value), None, rng.choice(INTEGERS)))


def text_like(value: str, rng: random.Random) -> Any:
    cut = rng.randrange(len(value) + 1)
    return rng.choice(
        (rng.choice(TEXTS), value[:cut], value + "x", value.upper(), value.encode(errors="replace"), value * 2, None)
    )


def bytes_like(value: bytes, rng: random.Random) -> Any:
    return rng.choice((b"", value + b"\0", value * 9, bytearray(value), value.hex(), None, memoryview(value)))


def array_like(value: np.ndarray, rng: random.Random) -> Any:
    makers: tuple[Callable[[], Any], ...] = (
        lambda: value[:0],
        lambda: value[:-1],
        lambda: value[::2],
        lambda: value[::-1],
        lambda: np.concatenate([value, value]),
        lambda: value.reshape(1, -1),
        lambda: np.broadcast_to(value[:1], (5,) * max(value.ndim, 1)) if value.ndim == 1 and len(value) else value[:0],
        lambda: value.astype(rng.choice((np.float32, np.bool_, np.uint8, np.uint64, np.int16, ">i4", "O", "c8"))),
        lambda: list_like(value.tolist(), rng) if value.ndim else junk(rng),
        lambda: array.array("i", [1, 2, 3]),
        lambda: misaligned(value),
        lambda: frozen(value),
        lambda: torch.from_numpy(value.copy()),
    )
    try:
        return rng.choice(makers)()
    except (TypeError, ValueError, IndexError):  # numpy cannot make that of it
        return value[:0] if value.ndim else None


def misaligned(value: np.ndarray) -> np.ndarray:
    memory = np.zeros(value.nbytes + 1, np.uint8)[1:]
    memory[:] = np.frombuffer(value.tobytes(), np.uint8)
    return memory.view(value.dtype) if value.nbytes else value


def frozen(value: np.ndarray) -> np.ndarray:
    copy = value.copy()
    copy.flags.writeable = False
    return copy


def list_like(value: Any, rng: random.Random) -> Any:
    items = list(value)
    index = rng.randrange(len(items)) if items else 0
    makers: list[Callable[[], Any]] = [lambda: items[:-1], lambda: [*items, *items], lambda: [], lambda: [items]]
    if items:
        makers += [lambda: [*items[:index], hostile(items[index], rng), *items[index + 1 :]]] * 4
        makers += [
            lambda: [*items, items[index]],
            lambda: items[index],
            lambda: iter(items),
            lambda: dict(enumerate(items)),
        ]
    made = rng.choice(makers)()
    return tuple(made) if isinstance(made, list) and rng.random() < 0.5 else made


def dict_like(value: dict, rng: random.Random) -> Any:
    made = dict(value)
    if made:
        name = rng.choice(sorted(made))
        made[name] = hostile(made[name], rng)
        if rng.random() < 0.3:
            del made[name]
    return rng.choice((made, made | {"unknown": 1}, list(made.items()), list(made)))


def tensor_like(value: torch.Tensor, rng: random.Random) -> Any:
    """Views of the same memory, too: a call that takes one may write to what the caller could have written."""
    makers = _VIEWS if rng.random() < 0.6 else _OTHERS
    try:
        return rng.choice(makers)(value, rng)
    except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):  # torch cannot make that of it
        return value


def with_number(value: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """One element, or all of them, become what they must not be."""
    made = value.clone()
    if made.dtype.is_floating_point:
        made = made.float() if made.element_size() == 1 else made
        number: float = rng.choice((math.nan, math.inf, -math.inf, 0.0, -1.0))
    else:
        info = torch.iinfo(made.dtype)
        number = min(
            max(rng.choice((-1, -2, 0, 1, 4, 5, 20, 2**31 - 1, 2**31, 2**62, -(2**62), *HUGE)), info.min), info.max
        )
    if made.numel() == 0 or rng.random() < 0.2:
        return made.fill_(number)
    made.view(-1)[rng.randrange(made.numel())] = number
    return made


_VIEWS: tuple[Callable[[torch.Tensor, random.Random], Any], ...] = (
    lambda t, rng: t[None],
    lambda t, rng: t[0],
    lambda t, rng: t[:0],
    lambda t, rng: t[:-1],
    lambda t, rng: t[1:],
    lambda t, rng: t[..., :0],
    lambda t, rng: t[..., :-1],
    lambda t, rng: t[..., ::2],
    lambda t, rng: t.transpose(0, -1),
    lambda t, rng: t.transpose(0, 1),
    lambda t, rng: t.flatten(),
    lambda t, rng: t[:1].expand_as(t),
    lambda t, rng: t[..., :1].expand_as(t),
    lambda t, rng: t.view(rng.choice(DTYPES)),
    lambda t, rng: t.unsqueeze(-1),
    lambda t, rng: t._neg_view(),
    lambda t, rng: t.as_strided(t.shape, [0] * t.dim()),
    lambda t, rng: torch.narrow(t, rng.randrange(t.dim()), 0, 1),
)
_OTHERS: tuple[Callable[[torch.Tensor, random.Random], Any], ...] = (
    with_number,
    with_number,
    with_number,
    lambda t, rng: t.to(rng.choice(DTYPES)),
    lambda t, rng: t.to(rng.choice(DTYPES)),
    lambda t, rng: t.to("meta"),
    lambda t, rng: t.to_sparse(),
    lambda t, rng: torch.nested.nested_tensor([t, t]),
    lambda t, rng: t.clone().requires_grad_(),
    lambda t, rng: torch.nn.Parameter(t.clone(), requires_grad=False),
    lambda t, rng: torch.cat([t, t]),
    lambda t, rng: torch.cat([t, t], -1),
    lambda t, rng: t.clone(),
    lambda t, rng: t.tolist(),
    lambda t, rng: t.numpy(),
    lambda t, rng: t.numel(),
    lambda t, rng: torch.empty(0),
    lambda t, rng: torch.tensor(1),
    lambda t, rng: without_memory(t.clone()),
)


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """As those of models that are sharded or off-loaded: a shape, and nothing behind it."""
    tensor.untyped_storage().resize_(0)
    return tensor


_MAKERS: tuple[tuple[Any, Callable[[Any, random.Random], Any]], ...] = (
    (bool, lambda value, rng: rng.choice((not value, int(value), None, "yes", 2, 0.5, np.bool_(value)))),
    (int, integer_like),
    (float, float_like),
    (str, text_like),
    (bytes, bytes_like),
    (torch.Tensor, tensor_like),
    (np.ndarray, array_like),
    ((list, tuple), list_like),
    (dict, dict_like),
)
