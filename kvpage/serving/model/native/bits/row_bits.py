"""RowBits: while it is active, what torch computes for a row does not depend on the other rows of a call.

    operator ─► EXACT       ─► torch
                REDUCTIONS  ─► torch, over contiguous memory
                FUNCTIONS   ─► torch, by whole vectors
                PRODUCTS    ─► the C++ core
                another     ─► OptionError, with its name

Native layers and attention compute as ever: they have that property by themselves. Where a model calls nothing but
these and operators that torch may compute as they come, the mode is left out, and costs nothing. Where mixers alone
call others, it is active in mixers alone, and there in the parts that do: before, between and after their native calls.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from kvpage.checks.errors import OptionError
from kvpage.ops.args.dispatch_modes import TransparentMode, is_dispatch_watched
from kvpage.ops.args.tokens import ROW_TYPES
from kvpage.serving.model.native.bits.fixed_products import UnfixedProduct, product
from kvpage.serving.model.native.bits.operators import (
    EXACT,
    EXACT_POWERS,
    FLOORED,
    FUNCTIONS,
    LAST_AXIS_ONLY,
    OF_INTEGERS,
    PRODUCTS,
    REDUCTIONS,
    SCALED,
)
from kvpage.serving.model.native.bits.whole_vectors import by_vectors, takes_vectors_alone
from kvpage.serving.model.native.torch_threads import TorchThreads

Rule = Callable[[Any, str, Sequence[Any], dict[str, Any]], Any]


class RowBits(TransparentMode):  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it
    """The mode of one model's view, for one thread.

    threads: the limit within which torch keeps to one thread: with more, they cut runs of elements at any place.
    replaced: the operators that torch would not compute as they come, so far, outside of mixers.
    replaced_in_mixers: the same, of mixers that keep states, by the number of native calls before.
    checked_version: that of the view whose operators are all known, see `is_needed`; None for none.
    """

    DEVICE = "cpu"

    def __init__(self, model_name: str, threads: TorchThreads) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.threads = threads
        self.replaced: set[str] = set()
        self.replaced_in_mixers: defaultdict[int, set[str]] = defaultdict(set)
        self._noted = self.replaced
        self._part, self._is_in_part = 0, False
        self.checked_version: int | None = None
        self._model_name = model_name
        self._rules: dict[int, tuple[str, Rule | None]] = {}  # by the id of an operator, which torch keeps for good

    @classmethod
    def of_model(cls, model: PreTrainedModel, threads: TorchThreads) -> "RowBits":
        """Return the mode of a model's view. OptionError where the kind of model or machine rules it out."""
        name = type(model).__name__
        for is_refused, why in (
            (model.device.type != cls.DEVICE, f"{name} is on {model.device}, and no layers there have such bits"),
            (model.dtype not in ROW_TYPES, f"{name} is in {model.dtype}, whose products are torch's"),
            (
                cls.DEVICE == "cpu" and not threads.can_limit,
                "torch's threads, which share a row's sums, cannot be limited in this process",
            ),
        ):
            if is_refused:
                raise OptionError(f"same_bits must be False: {why}")
        return cls(name, threads)

    def know(self, version: int) -> None:
        """Take it that all operators of a view are known. version: of the view."""
        self.checked_version = version

    def is_needed(self, version: int) -> bool:
        """Return whether a whole forward of a view needs the mode.

        version: of the view, whose modules may be others than those that were checked. Autocast, and modes of the
        caller's, take calls from native layers.
        """
        if self.replaced or version != self.checked_version:
            return True
        return torch.is_autocast_enabled("cpu") or is_dispatch_watched() or torch._C._len_torch_function_stack() > 0

    @contextmanager
    def of_mixer(self) -> Iterator[None]:
        """Be active in those parts inside that need it, and note what is replaced there as a mixer's."""
        before = self._noted
        self._begin_part(0)
        try:
            yield
        finally:
            self._end_part()
            self._noted = before

    def next_part(self) -> None:
        """Begin the next part of a mixer: it is about to make a native call."""
        self._end_part()
        self._begin_part(self._part + 1)

    def _begin_part(self, number: int) -> None:
        self._part, self._noted = number, self.replaced_in_mixers[number]
        self._is_in_part = bool(self._noted) and torch._C._len_torch_dispatch_stack() == 0
        if self._is_in_part:
            self.__enter__()  # type: ignore[no-untyped-call, unused-ignore]

    def _end_part(self) -> None:
        if self._is_in_part:
            self._is_in_part = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call, unused-ignore]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = self._rules.get(id(function))  # by its hash, which is Python code, takes longer
        if known is None:
            known = self._rules[id(function)] = self._rule_of(function)
        name, rule = known
        kwargs = kwargs or {}
        return function(*args, **kwargs) if rule is None else rule(function, name, args, kwargs)

    def _rule_of(self, function: Any) -> tuple[str, Rule | None]:
        """Return an operator's name and rule; None for one that torch computes as it comes."""
        space, name = function._schema.name.split("::")
        if space != "aten":
            return name, self._refuse
        if name in EXACT:
            rules = (SCALED, self._scaled), (FLOORED, self._divide), (OF_INTEGERS, self._sum_integers)
            return name, next((rule for names, rule in rules if name in names), None)
        for names, rule in ((REDUCTIONS, self._reduce), (PRODUCTS, self._multiply)):
            if name in names:
                return name, rule
        if name.removesuffix("_") in FUNCTIONS:
            return name, self._by_elements
        return name, self._refuse

    def _refuse(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], why: str = "") -> Any:
        called = " ".join(filter(None, (function._schema.name, why)))
        raise OptionError(
            f"same_bits must be False for {self._model_name}: it calls {called}, whose result for a row may depend on "
            f"the other rows"
        )

    def _scaled(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("alpha", 1) not in (1, -1):
            return self._refuse(function, name, args, kwargs, f"with alpha={kwargs['alpha']}")
        return function(*args, **kwargs)

    def _sum_integers(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        dtype = kwargs.get("dtype") or args[0].dtype
        if dtype.is_floating_point:
            return self._refuse(function, name, args, kwargs, "of floats")
        return function(*args, **kwargs)

    def _divide(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        is_floored = name == "floor_divide" or kwargs.get("rounding_mode") is not None
        if is_floored and any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in args):
            return self._refuse(function, name, args, kwargs, "of floats")
        return function(*args, **kwargs)

    def _reduce(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        if name in LAST_AXIS_ONLY and args[1] not in (-1, x.dim() - 1):
            return self._refuse(function, name, args, kwargs, f"along axis {args[1]}")
        if x.is_contiguous():
            return function(*args, **kwargs)
        self._noted.add(name)
        return function(x.contiguous(), *args[1:], **kwargs)

    def _multiply(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        self._noted.add(name)
        try:
            return product(name, args, kwargs, self.threads.caller or torch.get_num_threads())
        except UnfixedProduct as error:
            result: torch.Tensor = self._refuse(function, name, args, kwargs, str(error))
            return result

    def _by_elements(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        x, others = args[0], tuple(args[1:])
        if not isinstance(x, torch.Tensor) or x.is_complex() or any(isinstance(y, torch.Tensor) for y in others):
            return self._refuse(function, name, args, kwargs, "of several tensors")
        if (name.startswith("pow") and others[0] in EXACT_POWERS) or takes_vectors_alone(function, x, others, kwargs):
            return function(*args, **kwargs)
        self._noted.add(name)
        if not name.endswith("_"):
            return by_vectors(function, x, others, kwargs)
        return x.copy_(by_vectors(getattr(torch.ops.aten, name.removesuffix("_")), x, others, kwargs))
