"""An operation, declared once: a function, the operator of torch that stands for it, and the choice between the two.

    eager            ops.reshape_and_cache ─────────────────────────────────────────────────► the function
    torch.compile    ops.reshape_and_cache ─► pack ─► torch.ops.kvpage.reshape_and_cache
                                                      when the code runs: unpack ───────────► the function

The function's annotations are the declaration: `TENSORS` and `OPTIONS` say as what each kind of parameter travels.
Tensors come first in an operator, the others after them, the options of attention by name. A layout travels as its
`spec`, scales and lengths as tensors. An operator returns nothing. It writes into tensors that it gets, so that no
shape depends on values, and declares them as mutated. So a compiler neither drops a call nor moves one past another.
An operator checks at run time what the function checks. It has no derivatives.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_type_hints

import torch

from kvpage.layout.attention import OPTIONS as NAMES
from kvpage.layout.attention import Attention, option_values
from kvpage.layout.cache_layout import CacheLayout, check_layout
from kvpage.layout.kv_scales import KVScales
from kvpage.ops.args.bound_cache import BoundCache
from kvpage.ops.args.dispatch_modes import is_dispatch_watched
from kvpage.ops.args.tokens import Lengths
from kvpage.ops.cuda.sampling import SamplingMemory

_Library: Any = torch.library.Library  # torch gives its methods no types
_library = _Library("kvpage", "DEF")
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class Form(NamedTuple):
    """How a parameter of a function travels through an operator.

    schema: the operator's parameters, where {} is the function's name for it. pack: their values, of the function's.
    unpack: the function's value, of theirs; None for the one value as it is.
    """

    schema: tuple[str, ...]
    pack: Callable[[Any], Sequence[Any]] = lambda value: (value,)
    unpack: Callable[..., Any] | None = None


def _pack_lengths(lengths: Lengths | None) -> Sequence[Any]:
    is_ready = lengths is None or isinstance(lengths, torch.Tensor)
    return (lengths if is_ready else torch.tensor(lengths, dtype=torch.int64),)


def _pack_layout(layout: CacheLayout) -> Sequence[Any]:
    check_layout(layout)
    return (layout.spec,)


def _pack_scales(scales: KVScales | None) -> Sequence[Any]:
    return (None, None) if scales is None else (scales.key, scales.value)


def _unpack_scales(key: torch.Tensor | None, value: torch.Tensor | None) -> KVScales | None:
    """Whose values were looked at when a KVScales was made of them; both or none."""
    _check_both("scale", key, value)
    return None if key is None or value is None else KVScales.unchecked(key, value)


def _pack_layer_scales(scales: Sequence[KVScales] | None) -> Sequence[Any]:
    return (None, None) if scales is None else ([pair.key for pair in scales], [pair.value for pair in scales])


def _unpack_layer_scales(keys: list[torch.Tensor] | None, values: list[torch.Tensor] | None) -> list[KVScales] | None:
    _check_both("scales", keys, values)
    if keys is None or values is None:
        return None
    return [KVScales.unchecked(key, value) for key, value in zip(keys, values, strict=True)]


def _check_both(suffix: str, key: object, value: object) -> None:
    if (key is None) != (value is None):
        rule = f"key_{suffix} and value_{suffix} must both be given, or none"
        raise ValueError(f"{rule}, got {type(key)} and {type(value)}")


def _pack_memory(memory: SamplingMemory | None) -> Sequence[Any]:
    return (None,) * 4 if memory is None else (memory.tops, memory.shares, memory.lists, memory.held)


def _together(*values: Any) -> tuple[Any, ...]:
    return values


_layout = Form(("str {}",), _pack_layout, CacheLayout.from_spec)
TENSORS: dict[Any, Form] = {
    torch.Tensor: Form(("Tensor {}",)),
    torch.Tensor | None: Form(("Tensor? {}",)),
    torch.Tensor | BoundCache: Form(("Tensor {}",)),  # unbound
    Sequence[torch.Tensor]: Form(("Tensor[] {}",), lambda tensors: (list(tensors),)),
    Lengths: Form(("Tensor {}",), _pack_lengths),
    Lengths | None: Form(("Tensor? {}",), _pack_lengths),
    tuple[torch.Tensor, torch.Tensor | None] | None: Form(("Tensor key", "Tensor? value"), tuple, _together),
}
OPTIONS: dict[Any, Form] = {
    CacheLayout: _layout,
    CacheLayout | None: _layout,
    KVScales | None: Form(("Tensor? key_scale=None", "Tensor? value_scale=None"), _pack_scales, _unpack_scales),
    Sequence[KVScales] | None: Form(
        ("Tensor[]? key_scales=None", "Tensor[]? value_scales=None"), _pack_layer_scales, _unpack_layer_scales
    ),
    SamplingMemory | None: Form(
        tuple(f"Tensor? {name}=None" for name in ("tops", "shares", "lists", "held")), _pack_memory, _together
    ),
    int: Form(("int {}",)),
    float: Form(("float {}",)),
    bool: Form(("bool {}",)),
    str: Form(("str {}",)),
    int | None: Form(("int? {}=None",)),
    torch.dtype | None: Form((), lambda dtype: ()),  # of new tensors: those that are written are made before
}
SCHEMA_TYPES = {float | None: "float?", int | None: "int?", torch.Tensor | None: "Tensor?"}
ATTENTION = [f"{SCHEMA_TYPES[kind]} {name}=None" for name, kind in get_type_hints(Attention).items()]


def operation(
    function: Callable[_Given, _Result],
    writes: Sequence[str],
    make_out: Callable[[Mapping[str, Any]], Any] | None = None,
    run: Callable[..., None] | None = None,
    eager_only: Sequence[str] = (),
) -> Callable[_Given, _Result]:
    """Declare a function's operator, and return what calls the function or, while torch traces the call, the operator.

    Args:
        function: The operation, all of whose parameters are of the kinds in `TENSORS` and `OPTIONS`, or options of
            attention. A cache that may be bound is `cache`, with `layout` and `scales`.
        writes: The parameters whose tensors it writes.
        make_out: Makes the tensors of `out` in traced code, of all arguments by name. The function then returns `out`.
        run: Calls the function for the operator. Default: the function itself.
        eager_only: Parameters that traced code cannot give.

    Returns:
        The operation, with the function's signature and documentation.

    Raises:
        KeyError: A parameter is of another kind.
        ValueError: What is written is no parameter.
    """
    signature, kinds = inspect.signature(function), get_type_hints(function)
    if not set(writes) <= set(signature.parameters):
        raise ValueError(f"writes must be among {', '.join(signature.parameters)}, got {', '.join(writes)}")
    has_options = "options" in signature.parameters
    left_out = {*eager_only, "options", "attention"} if has_options else set(eager_only)
    names = sorted(
        [name for name in signature.parameters if name not in left_out], key=lambda name: kinds[name] in OPTIONS
    )
    forms = {name: _form(kinds[name], name in writes and make_out is not None) for name in names}
    _define(function.__name__, _schema_of(forms, writes, has_options), _unpacking(forms, run or function, has_options))
    return or_traced(function, _packing(function, forms, signature, make_out, eager_only))


def or_traced(run: Callable[_Given, _Result], traced: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Return what calls `run` or, while torch traces the call, `traced`: tensors have no memory then.

    Args:
        run: The operation itself.
        traced: Does the same with operators.

    Returns:
        The operation, with the signature and documentation of `run`.
    """

    @functools.wraps(run)
    def operation(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        is_traced = torch.compiler.is_compiling() or (
            torch._C._len_torch_dispatch_stack() > 0 and is_dispatch_watched()
        )
        return (traced if is_traced else run)(*args, **kwargs)

    return operation


def _form(kind: Any, is_made: bool) -> Form:
    """is_made: the operator always gets it."""
    form = (TENSORS | OPTIONS)[kind]
    return form._replace(schema=("Tensor {}",)) if is_made and form.schema == ("Tensor? {}",) else form


def _schema_of(forms: Mapping[str, Form], writes: Sequence[str], has_options: bool) -> str:
    """What is written is a set of its own for each parameter: (a!), (b!) and so on."""
    sets, parts = iter("abcdefgh"), []
    for name, form in forms.items():
        for part in form.schema:
            parts.append(part.replace("Tensor", f"Tensor({next(sets)}!)" if name in writes else "Tensor").format(name))
    return ", ".join([*parts, "*", *ATTENTION] if has_options else parts)


def _define(name: str, schema: str, run: Callable[..., None]) -> None:
    """Register an operator on all devices, and its fake."""
    _library.define(f"{name}({schema}) -> ()", tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    for key in ("CompositeExplicitAutograd", "Negative", "Conjugate"):  # torch's own for the last two work on
        _library.impl(name, run, key)  # copies, and fail in the middle where an optional tensor is None
    torch.library.register_fake(f"kvpage::{name}", _writes_nothing, lib=_library)


def _writes_nothing(*args: Any, **kwargs: Any) -> None:
    """What an operation does with tensors that have no memory: shapes are checked with the values, at run time."""


def _unpacking(forms: Mapping[str, Form], run: Callable[..., Any], has_options: bool) -> Callable[..., None]:
    """Return what an operator runs. It is compiled from text: a loop over the parameters would take as long as binding.

    The text holds names of parameters in our source alone, and no caller's values. It is run while kvpage is imported.

    def operator(key, value, cache, slot_mapping, layout, key_scale=None, value_scale=None):
        run(key=key, ..., layout=unpack_layout(layout), scales=unpack_scales(key_scale, value_scale))
    """
    parameters, arguments = [], []
    for name, form in forms.items():
        parts = [part.format(name).split(" ")[1] for part in form.schema]
        parameters += parts
        values = ", ".join(part.removesuffix("=None") for part in parts)
        arguments += [f"{name}={values}" if form.unpack is None else f"{name}=unpack_{name}({values})"] * bool(parts)
    rest = ["**options"] * has_options
    text = f"def operator({', '.join(parameters + rest)}): run({', '.join(arguments + rest)})"
    names: dict[str, Any] = {f"unpack_{name}": form.unpack for name, form in forms.items()}
    names["run"] = run
    exec(text, names)
    made: Callable[..., None] = names["operator"]
    return made


def _packing(
    function: Callable[_Given, _Result],
    forms: Mapping[str, Form],
    signature: inspect.Signature,
    make_out: Callable[[Mapping[str, Any]], Any] | None,
    eager_only: Sequence[str],
) -> Callable[_Given, _Result]:
    """Return what traced code calls in place of the function."""
    name, parameters = function.__name__, signature.parameters.values()
    has_options = "options" in signature.parameters
    known = [
        parameter
        for parameter in parameters
        if parameter.name not in eager_only and parameter.kind is not parameter.VAR_KEYWORD
    ]
    places = [parameter.name for parameter in known if parameter.kind is not parameter.KEYWORD_ONLY]
    defaults = {parameter.name: parameter.default for parameter in known if parameter.default is not parameter.empty}
    names = {parameter.name for parameter in known}

    def traced(*args: Any, **kwargs: Any) -> Any:
        options = {key: kwargs.pop(key) for key in list(kwargs) if key not in names} if has_options else {}
        arguments = _bound(name, names, places, defaults, args, kwargs)
        if has_options:
            options = _options(arguments.pop("attention"), options)
        _unbind(arguments)
        if make_out is not None and arguments["out"] is None:
            arguments["out"] = make_out({**options, **arguments})
        values = [value for key, form in forms.items() for value in form.pack(arguments[key])]
        getattr(torch.ops.kvpage, name)(*values, **options)
        return None if make_out is None else arguments["out"]

    return traced


def _bound(
    name: str,
    names: set[str],
    places: Sequence[str],
    defaults: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Return all arguments by name; TypeError where the function has other parameters."""
    placed = dict(zip(places, args, strict=False))
    arguments = {**defaults, **placed, **kwargs}
    if len(args) > len(places) or arguments.keys() != names or placed.keys() & kwargs.keys():
        raise TypeError(
            f"arguments of {name} must be {', '.join(sorted(names))}, each once, got {', '.join(arguments)}"
        )
    return arguments


def _options(attention: Attention | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of attention by name; errors as of `Attention.of`."""
    for name in options:
        if name not in NAMES:
            raise TypeError(f"options must be among {', '.join(NAMES)}, got {name}")
    if attention is None:
        return options
    if options:
        raise ValueError(f"options must be given in attention or by name, got both: {', '.join(options)}")
    return option_values(attention)


def _unbind(arguments: dict[str, Any]) -> None:
    """Put the parts of a bound cache in its place."""
    cache = arguments.get("cache")
    if not isinstance(cache, BoundCache):
        return
    if arguments["layout"] is not None or arguments["scales"] is not None:
        raise ValueError("layout and scales must be None for a BoundCache, which has its own")
    arguments.update(cache=cache.tensor, layout=cache.layout, scales=cache.scales)
