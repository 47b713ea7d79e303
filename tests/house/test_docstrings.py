"""Public names describe their arguments, results and errors: Args, Returns and Raises in their docstrings.

`UNWRITTEN` would name those that do not yet. It is empty, and must stay so. `python tests/house/test_docstrings.py`
prints shortcomings; with `--write` it writes the list anew, for a look at what is left in a large change.
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
HEADER = "# Public names whose docstrings lack Args, Returns or Raises. The list must stay empty: write the sections.\n"


def unwritten() -> set[str]:
    """Return the names in the list."""
    return {line for line in UNWRITTEN.read_text().splitlines() if line and not line.startswith("#")}


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
    assert {name: lacks for name, lacks in shortcomings(module_name).items() if name not in unwritten()} == {}


def test_the_list_stays_empty() -> None:
    assert UNWRITTEN.read_text().startswith("# ")
    assert unwritten() == set()


def main(arguments: list[str]) -> None:
    found = {name: lacks for one in MODULES for name, lacks in shortcomings(one).items()}
    if arguments == ["--write"]:
        UNWRITTEN.write_text(HEADER + "".join(f"{name}\n" for name in sorted(found)))
    else:
        for name, lacks in found.items():
            print(f"{name}: {lacks}")


if __name__ == "__main__":
    main(sys.argv[1:])
