"""Packages of others that are not installed here: modules of fakes, until the end of a test."""

import sys
import types
from collections.abc import Mapping
from typing import Any


def install(monkeypatch: Any, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Let imports find modules with these members, and the packages that they are in."""
    for name, members in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            package, parent = ".".join(parts[:end]), ".".join(parts[: end - 1])
            if not hasattr(sys.modules.get(package), "is_fake"):
                module = types.ModuleType(package)
                module.is_fake, module.__path__ = True, []
                monkeypatch.setitem(sys.modules, package, module)
                if parent:
                    monkeypatch.setattr(sys.modules[parent], parts[end - 1], module, raising=False)
        for member, value in members.items():
            setattr(sys.modules[name], member, value)
