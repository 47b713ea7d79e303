"""Public names describe their arguments, results and errors: Args, Returns and Raises in their docstrings.

`UNWRITTEN` names those that do not yet, and may only shrink. `python tests/house/test_docstrings.py` prints their
shortcomings; with `--write` it writes the list anew.
"""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from house.test_public_names import EXTRAS, MODULES  # noqa: E402
from support.docstrings import lacking, lacking_of_class, public_methods  # noqa: E402

UNWRITTEN = Path(__file__).with_name("unwritten_docstrings.txt")


def shortcomings(module_name: str) -> dict[str, str]:
    """Return what the docstrings of a module's public names lack, by name."""
    module, found = importlib.import_module(module_name), {}
    for name in module.__all__:
        value = getattr(module, name)
        if not str(getattr(value, "__module__", "")).startswith("kvpage") or value.__module__ == "kvpage._C":
            continue
        if inspect.isfunction(value):
            found[f"{module_name}.{name}"] = list(lacking(inspect.unwrap(value)))
        elif isinstance(value, type):
            found[f"{module_name}.{name}"] = list(lacking_of_class(value))
            for method_name, method in public_methods(value):
                found[f"{module_name}.{name}.{method_name}"] = list(lacking(method))
    return {name: "; ".join(lacks) for name, lacks in found.items() if lacks}


@pytest.mark.parametrize("module_name", MODULES)
def test_public_names_describe_arguments_results_and_errors(module_name: str) -> None:
    pytest.importorskip(EXTRAS.get(module_name, "torch"))
    tolerated = {line for line in UNWRITTEN.read_text().splitlines() if line}
    found = shortcomings(module_name)
    assert {name: lacks for name, lacks in found.items() if name not in tolerated} == {}
    stale = {name for name in tolerated if name.rpartition(".")[0].startswith(module_name)} & described(module_name)
    assert stale - found.keys() == set(), f"these are written now; take them out of {UNWRITTEN.name}"


def described(module_name: str) -> set[str]:
    """Return the public names of a module, and those of its classes' methods."""
    module = importlib.import_module(module_name)
    names = {f"{module_name}.{name}" for name in module.__all__}
    kinds = {name: value for name in module.__all__ if isinstance(value := getattr(module, name), type)}
    return names | {
        f"{module_name}.{name}.{method}" for name, kind in kinds.items() for method, _ in public_methods(kind)
    }


def main(arguments: list[str]) -> None:
    found = {name: lacks for one in MODULES for name, lacks in shortcomings(one).items()}
    if arguments == ["--write"]:
        UNWRITTEN.write_text("".join(f"{name}\n" for name in sorted(found)))
    else:
        for name, lacks in found.items():
            print(f"{name}: {lacks}")


if __name__ == "__main__":
    main(sys.argv[1:])
