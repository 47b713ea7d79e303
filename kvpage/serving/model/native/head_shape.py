"""HeadShape: how an attention module makes heads of its rows, and with which options it attends. It was tried out.

rows ─► q_proj ─► heads ─► q_norm ─┐
rows ─► k_proj ─► heads ─► k_norm ─┴─► rotate ─► attention function ─► o_proj
rows ─► v_proj ─► heads ───────────────────────►                          norms where there are any
"""

import inspect
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from kvpage.serving.model.meaning import with_meaning
from kvpage.serving.model.native.trial import random_rows

ROTATE = "apply_rotary_pos_emb"
FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"
"""Names that nearly all models use for a function of their file, and for transformers' table of attention functions."""
PRODUCTS = "q_proj", "k_proj", "v_proj", "o_proj"
NORMS = "q_norm", "k_norm"
NUM_TOKENS = 3  # in the trial
SCALE = 6e4  # of rows in the trial: a limit would show
OTHERS = "kvpage", "another"
"""Arguments that a module does not know."""


class HeadShape(NamedTuple):
    """What is known of an attention module.

    size, value_size: elements of a head.
    has_norms: whether heads of queries and keys are normed.
    scaling, sliding_window, softcap: the arguments of the attention function; None for the usual.
    absent: names of arguments that the module must not get, or as None.
    """

    size: int
    value_size: int
    has_norms: bool
    scaling: float | None
    sliding_window: int | None
    softcap: float | None
    absent: frozenset[str]


class Trial:
    """One call of a module's own forward, whose parts are stubs, and whose functions tell of their arguments."""

    def __init__(self, counts: tuple[int, ...], size: int) -> None:
        """counts: columns of the three products. size: elements of a head."""
        self._size = size
        rows = random_rows(1, NUM_TOKENS, sum(counts)) * SCALE
        self.hidden, self.embeddings = random_rows(1, NUM_TOKENS, 2), (random_rows(1, 1), random_rows(2, 1))
        self.products = dict(zip(PRODUCTS, torch.split(rows, [*counts], -1), strict=False))
        self.rotated = random_rows(1), random_rows(2)
        self.output, self.result = random_rows(1, NUM_TOKENS, counts[0] // size, 2), random_rows(3)
        self.is_as_expected = True
        self.options: dict[str, Any] = {}
        self.others = {name: object() for name in OTHERS}
        self._versions = self._seen_versions()

    def is_unchanged(self) -> bool:
        """Return whether nothing that was handed out was changed in place: then a comparison with it tells nothing."""
        return self._seen_versions() == self._versions

    def _seen_versions(self) -> list[int]:
        rows = self.hidden, *self.embeddings, *self.products.values(), *self.rotated, self.output, self.result
        return [part._version for part in rows]

    def parts(self, has_norms: bool) -> dict[str, Any]:
        """Return the stubs by name."""
        stubs: dict[str, Any] = {name: self._product(name) for name in PRODUCTS[:3]}
        norms = {name: self._norm(number) for number, name in enumerate(NORMS) if has_norms}
        return {**stubs, **norms, "o_proj": self._end}

    def heads(self, name: str, norm: int | None) -> torch.Tensor:
        """Return a product as attention gets it. norm: the number of a norm."""
        rows = self.products[name]
        heads = rows.view(*rows.shape[:2], -1, self._size).transpose(1, 2)
        return heads if norm is None else normed(heads, norm)

    def _product(self, name: str) -> Any:
        def product(rows: object) -> torch.Tensor:
            self.is_as_expected &= rows is self.hidden
            return self.products[name]

        return product

    def _norm(self, number: int) -> Any:
        def norm(rows: torch.Tensor) -> torch.Tensor:
            self.is_as_expected &= rows.dim() == 4 and rows.shape[3] == self._size
            return normed(rows, number)

        return norm

    def rotate(self, has_norms: bool) -> Any:
        """Return the stub of the function that rotates."""

        def rotate(query: torch.Tensor, key: torch.Tensor, cos: object, sin: object) -> tuple[Any, Any]:
            norms = (0, 1) if has_norms else (None, None)
            want = [self.heads(name, norm) for name, norm in zip(PRODUCTS[:2], norms, strict=True)]
            self.is_as_expected &= torch.equal(query, want[0]) and torch.equal(key, want[1])
            self.is_as_expected &= cos is self.embeddings[0] and sin is self.embeddings[1]
            return self.rotated

        return rotate

    def attend(self, module: object, query: object, key: object, value: torch.Tensor, mask: None, **kwargs: Any) -> Any:
        """Stand for the attention function."""
        self.is_as_expected &= query is self.rotated[0] and key is self.rotated[1]
        self.is_as_expected &= torch.equal(value, self.heads("v_proj", None))
        self.is_as_expected &= all(kwargs.pop(name, None) is other for name, other in self.others.items())
        self.options = kwargs
        return self.output, None

    def get_interface(self, *args: object) -> Any:
        """Stand for the table of attention functions."""
        return self.attend

    def _end(self, rows: torch.Tensor) -> torch.Tensor:
        self.is_as_expected &= torch.equal(rows, self.output.flatten(2))
        return self.result


def normed(rows: torch.Tensor, number: int) -> torch.Tensor:
    """Return what a norm of this number makes of rows in the trial."""
    return rows * (number + 2) + 1


def head_shape_of(module: nn.Module) -> HeadShape | None:
    """Return the shape of an attention module, found by trying its forward out; None for other modules."""
    parts: dict[str, Any] = module._modules
    forward = type(module).forward
    size: Any = vars(module).get("head_dim")
    has_norms = parts.keys() == {*PRODUCTS, *NORMS}
    if not (has_norms or parts.keys() == {*PRODUCTS}) or type(size) is not int or type(forward) is not FunctionType:
        return None
    if module._parameters or module._buffers or any(type(parts[name]) is not nn.Linear for name in PRODUCTS):
        return None
    counts = tuple(parts[name].out_features for name in PRODUCTS[:3])
    if size < 1 or any(count % size or not count for count in counts):
        return None
    trial = Trial(counts, size)
    tried = with_meaning(forward, ROTATE, trial.rotate(has_norms))
    tried = None if tried is None else with_meaning(tried, FUNCTIONS, trial)
    if tried is None:
        return None
    absent, result = _result(module, tried, trial, has_norms)
    if not (trial.is_as_expected and trial.is_unchanged() and _is_result(result, trial)):
        return None
    return _shape(trial, size, has_norms, absent)


def _result(module: nn.Module, tried: FunctionType, trial: Trial, has_norms: bool) -> tuple[frozenset[str], object]:
    """Run the forward. Return the names of its arguments that were None, and what it returns."""
    copied = type(module).__new__(type(module))
    vars(copied).update(vars(module), _modules=trial.parts(has_norms))
    parameters = [*inspect.signature(tried).parameters.values()][1:]
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    known = {"hidden_states": trial.hidden, "position_embeddings": trial.embeddings}
    absent = frozenset(names) - known.keys() - {"attention_mask"}
    try:
        with torch.no_grad():
            result = tried(copied, **{**dict.fromkeys(names), **known, **trial.others})
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):  # it is of another form
        return absent, None
    return absent, result


def _is_result(result: object, trial: Trial) -> bool:
    return type(result) is tuple and len(result) == 2 and result[0] is trial.result and result[1] is None


def _shape(trial: Trial, size: int, has_norms: bool, absent: frozenset[str]) -> HeadShape | None:
    """Return the shape, if all options are plain numbers."""
    options = trial.options
    kinds = {name: type(option) for name, option in options.items()}
    if any(kind not in (type(None), bool, int, float) for kind in kinds.values()) or options.get("s_aux") is not None:
        return None
    numbers = (options.get(name) for name in ("scaling", "sliding_window", "softcap"))
    return HeadShape._make((size, size, has_norms, *numbers, absent))
