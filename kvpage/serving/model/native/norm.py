"""Norms of a view that compute with kvpage's own operation. Each was tried out against its model's own.

    x / sqrt(mean(x^2) + epsilon) * weight        Llama and most others; Gemma has 1 + weight, and rounds later

Like NativeLinear, each shares all attributes with the model's norm.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from kvpage import ops
from kvpage.layout.row_norm import RowNorm
from kvpage.ops.cpu.operands import check_memory
from kvpage.serving.model.native.plain import DTYPES, is_unwatched
from kvpage.serving.model.native.trial import own_forward, random_rows, relative_error

ComputeNorm = Callable[[torch.Tensor, Any, float, float, bool], torch.Tensor | None]
TakeNorm = Callable[[nn.Module, torch.Tensor, RowNorm], torch.Tensor | None]
EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""Names that models give to the epsilon of their norms."""
MAX_ERROR = 1e-5  # of fp32 rows, relative
SCALES = (1.0, 1e-3, 1e2)  # of rows: where epsilon counts, and where it does not


class NormFormula(NamedTuple):
    """One norm's formula: see kvpage.ops.rms_norm. epsilon: the name of the attribute that holds it."""

    epsilon: str
    weight_offset: float
    rounds_before_weight: bool

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return ops.rms_norm(rows, weight, epsilon, self.weight_offset, self.rounds_before_weight)


class NormKinds:
    """Classes of norms for one view: a subclass for each class of the model's norms that it meets.

    Args:
        is_plain: Tells whether a call has only to compute.
        compute: Returns kvpage.ops.rms_norm of (rows, weight, eps, weight_offset, rounds_before_weight); None for rows
            and weights that it does not take.
        take: Returns the norm of these rows where it was computed before; None elsewhere.
    """

    def __init__(
        self,
        is_plain: Callable[[torch.Tensor], bool],
        compute: ComputeNorm,
        take: TakeNorm = lambda norm, rows, numbers: None,
    ) -> None:
        self._is_plain, self._compute, self._take = is_plain, compute, take
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}

    def stand_in(self, source: nn.Module) -> nn.Module | None:
        """Return a norm that stands in for `source`; None if it is none, or computes something else."""
        name = _epsilon_name(source)
        formula = None if name is None else _formula_of(source, name)
        if formula is None:
            return None
        kind = type(source)
        if kind not in self._classes:
            self._classes[kind] = _native_class(kind, self._is_plain, self._compute, self._take)
        norm: nn.Module = self._classes[kind].__new__(self._classes[kind])
        object.__setattr__(norm, "__dict__", vars(source))
        object.__setattr__(norm, "_native", (source, formula, kind.forward))
        return norm


def is_native_norm(module: nn.Module) -> bool:
    """Return whether the module is one that NormKinds made."""
    return type(module).__module__ == __name__


def row_norm_of(module: nn.Module | None) -> RowNorm | None:
    """Return the numbers of a norm that NormKinds made, if its call would now be their formula and nothing else."""
    if module is None or not is_native_norm(module) or not is_unwatched(module):
        return None
    native: Any = module._native
    source, _, tried = native
    kind: Any = type(module).__bases__[0]
    if type(source) is not kind or kind.forward is not tried:
        return None
    numbers = _numbers_of(module)
    return None if numbers.weight is None else numbers


def _numbers_of(norm: Any) -> RowNorm:
    _, (epsilon, offset, rounds), _ = norm._native
    attributes = vars(norm)
    return RowNorm(attributes["_parameters"].get("weight"), attributes[epsilon], offset, rounds)


def _epsilon_name(source: nn.Module) -> str | None:
    """Return the name of the epsilon of a module that looks like an RMS norm; None for others."""
    if not type(source).__name__.endswith("RMSNorm") or source._modules or source._buffers or "forward" in vars(source):
        return None
    weight = source._parameters.get("weight")
    if weight is None or len(source._parameters) != 1 or weight.dim() != 1 or weight.dtype not in DTYPES:
        return None
    names = [name for name in EPSILONS if type(vars(source).get(name)) is float]
    return names[0] if len(names) == 1 else None


def _formula_of(source: nn.Module, name: str) -> NormFormula | None:
    """Try the norm out. In fp32 its formula shows; in bf16 how it rounds, of which the nearer way is taken."""
    formulas = [NormFormula(name, offset, rounds) for offset in (0.0, 1.0) for rounds in (True, False)]
    equal = [formula for formula in formulas if _error(source, formula, torch.float32) <= MAX_ERROR]
    return min(equal, key=lambda formula: _error(source, formula, torch.bfloat16), default=None)


def _error(source: nn.Module, formula: NormFormula, dtype: torch.dtype) -> float:
    """Return the relative error on random rows, with a random weight; infinite where the forward is of another form."""
    size = len(source._parameters["weight"])  # type: ignore[arg-type]  # _epsilon_name has seen it
    weight = (random_rows(1, size)[0] + 0.5).to(dtype)
    rows = torch.cat([random_rows(2, size) * scale for scale in SCALES]).to(dtype)
    expected = own_forward(source, rows, _parameters={"weight": weight})
    if expected is None:
        return float("inf")
    return relative_error(formula(rows, weight, vars(source)[formula.epsilon]).float(), expected.float())


def _native_class(
    kind: type[nn.Module], is_plain: Callable[[torch.Tensor], bool], compute: ComputeNorm, take: TakeNorm
) -> type[nn.Module]:
    """Return the subclass of a class of norms whose forward is native for plain calls.

    A forward that the class gets after the trial is called instead.
    """

    def forward(norm: Any, *args: Any, **kwargs: Any) -> Any:
        source, _, tried = norm._native
        is_as_tried = type(source) is kind and kind.forward is tried
        if len(args) == 1 and not kwargs and is_as_tried and is_plain(args[0]):
            numbers = _numbers_of(norm)
            output = take(norm, args[0], numbers)
            if output is None:
                output = compute(args[0], *numbers)
            if output is not None:
                return output
            check_memory(weight=numbers.weight)
        return type(source).forward(source, *args, **kwargs)

    return type(f"Native{kind.__name__}", (kind,), {"__slots__": ("_native",), "forward": forward})
