"""AttributePatch: attributes of modules that are replaced for a time, and then are as before."""

from collections.abc import Mapping
from types import TracebackType

from torch import nn

_ABSENT = object()


class AttributePatch:
    """Replace one attribute of some modules: set it on entry, and undo it on exit, whatever has happened between.

    The attributes are the modules' own. A submodule of the same name is hidden, and nothing is registered or removed:
    parameters, submodules and hooks stay as they are. Not for two threads over the same modules.
    """

    def __init__(self, name: str, values: Mapping[nn.Module, object]) -> None:
        self._name, self._values = name, values
        self._before: list[tuple[nn.Module, object]] = []

    def __enter__(self) -> None:
        for module, value in self._values.items():
            self._before.append((module, vars(module).get(self._name, _ABSENT)))
            vars(module)[self._name] = value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._before:
            module, value = self._before.pop()
            if value is _ABSENT:
                vars(module).pop(self._name, None)
            else:
                vars(module)[self._name] = value
