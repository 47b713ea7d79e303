"""LayerShape: in which order a decoder layer calls its parts, and adds its residuals. The layer was tried out.

    rows ─┬─► first ─► attention ─► after_attention ─► + ─┬─► second ─► mlp ─► after_mlp ─► + ─►
          └────────────────────────────────────────────┘ └────────────────────────────────┘

Llama has `first` and `second`, Gemma 3 all four norms, OLMo 2 the two after modules.
"""

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from kvpage.serving.model.native.trial import random_rows

SIZE = 8  # of rows, in the trial
SCALES = (1.0, 1e3, 6e4)  # of rows: some sums are too large for fp16, which a limit would show
DTYPES = torch.float32, torch.bfloat16, torch.float16
ROWS = "hidden_states"
"""The name by which layers give their attention its rows."""


class LayerShape(NamedTuple):
    """Names of a layer's parts; None for a norm that it does not have.

    defaults: by name, what attention gets for arguments that the layer does not get.
    takes_others: whether arguments of other names are handed on to attention, too.
    """

    first: str | None
    attention: str
    after_attention: str | None
    second: str | None
    mlp: str
    after_mlp: str | None
    defaults: dict[str, Any]
    takes_others: bool

    def fits(self, kwargs: dict[str, Any]) -> bool:
        """Return whether these are arguments that the layer would hand on, and all that it needs."""
        if not self.takes_others and not kwargs.keys() <= self.defaults.keys():
            return False
        needed = (name for name, default in self.defaults.items() if default is inspect.Parameter.empty)
        return ROWS not in kwargs and all(name in kwargs for name in needed)


class Call(NamedTuple):
    """A call of a part in the trial."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Argument:
    """Stands for an argument that a layer must hand on without a look at it."""

    def __bool__(self) -> bool:
        raise TypeError("a layer that looks at its arguments has a shape of its own")


class Part:
    """Stands for a part of a layer, and tells of its calls. It returns a pair, as attention does, if it gets names."""

    def __init__(self, name: str, number: int, calls: list[Call]) -> None:
        self._name, self._number, self._calls = name, number, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append(Call(self._name, args, kwargs))
        output = marked(kwargs[ROWS] if kwargs else args[0], self._number)
        return (output, None) if kwargs else output


def marked(rows: torch.Tensor, number: int) -> torch.Tensor:
    """Return what a part of this number makes of rows in the trial."""
    return (rows * (0.5 + 0.125 * number)).abs() - number


def shape_of(module: nn.Module, norms: list[str]) -> LayerShape | None:
    """Return the shape of a decoder layer, found by trying its forward out; None for other modules.

    norms: names of its norms.
    """
    parts = [name for name, part in module._modules.items() if part is not None]
    if module._parameters or module._buffers or "forward" in vars(module) or len(parts) != len(norms) + 2:
        return None
    parameters = [*inspect.signature(type(module).forward).parameters.values()][2:]
    takes_others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    defaults = {part.name: part.default for part in parameters if part.kind is part.POSITIONAL_OR_KEYWORD}
    if len(defaults) + takes_others != len(parameters):
        return None
    names = [*defaults, *(("kvpage", "another") if takes_others else ())]
    calls = _calls_of(module, parts, random_rows(1, 2, SIZE), {name: Argument() for name in names})[0]
    for order in _orders([call.name for call in calls], norms):
        shape = LayerShape._make((*order, defaults, takes_others))
        if all(_has(shape, module, parts, names, *case) for case in _cases()):
            return shape
    return None


def _orders(names: list[str], norms: list[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the names of parts that a layer with calls in this order may have, as LayerShape names them."""
    modules = [name for name in names if name not in norms]
    if len(modules) != 2 or len({*names}) != len(names):
        return
    attention, mlp = map(names.index, modules)
    before: list[Any] = names[:attention]
    after: list[Any] = names[mlp + 1 :]
    between = names[attention + 1 : mlp]
    if len(before) > 1 or len(after) > 1 or not 1 <= len(between) <= 2:
        return
    pairs: list[list[Any]] = [between] if len(between) == 2 else [[None, between[0]], [between[0], None]]
    for pair in pairs:
        yield (*(before or [None]), modules[0], *pair, modules[1], *(after or [None]))


def _cases() -> Iterator[tuple[torch.Tensor, type[Argument] | None]]:
    for dtype in DTYPES:
        for scale in SCALES:
            yield (random_rows(1, 3, SIZE) * scale).to(dtype), Argument
    yield random_rows(1, 3, SIZE), None


def _has(
    shape: LayerShape,
    module: nn.Module,
    parts: list[str],
    names: list[str],
    rows: torch.Tensor,
    kind: type[Argument] | None,
) -> bool:
    """Whether the layer computes, with arguments of this kind, what one of the shape does, bit by bit."""
    kwargs = {name: None if kind is None else kind() for name in names}
    expected = _formula(shape, rows, parts)  # before the layer, which may change its rows
    calls, output = _calls_of(module, parts, rows, kwargs)
    if type(output) is not torch.Tensor or output.dtype is not expected.dtype or output.shape != expected.shape:
        return False
    if not torch.allclose(output, expected, rtol=0, atol=0, equal_nan=True):
        return False
    for call in calls:
        if call.name == shape.attention:
            handed = {name: value for name, value in call.kwargs.items() if name != ROWS}
            if call.args or handed.keys() != kwargs.keys() or any(handed[name] is not kwargs[name] for name in kwargs):
                return False
        elif len(call.args) != 1 or call.kwargs:
            return False
    return True


def _calls_of(
    module: nn.Module, parts: list[str], rows: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[list[Call], object]:
    """Run the layer's own forward over parts that tell of their calls. Return these, and what it returns."""
    calls: list[Call] = []
    copied = type(module).__new__(type(module))
    stubs = {name: Part(name, number, calls) for number, name in enumerate(parts)}
    vars(copied).update(vars(module), _modules=stubs)
    try:
        with torch.no_grad():
            return calls, type(module).forward(copied, rows, **kwargs)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):  # it is no layer of this kind
        return [], None


def _formula(shape: LayerShape, rows: torch.Tensor, parts: list[str]) -> torch.Tensor:
    """Return what the parts of the trial make of rows in a layer of the shape."""

    def through(name: str | None, rows: torch.Tensor) -> torch.Tensor:
        return rows if name is None else marked(rows, parts.index(name))

    rows = rows + through(shape.after_attention, through(shape.attention, through(shape.first, rows)))
    return rows + through(shape.after_mlp, through(shape.mlp, through(shape.second, rows)))
