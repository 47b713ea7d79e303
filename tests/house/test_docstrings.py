"""Public names describe their arguments, results and errors: Args, Returns and Raises in their docstrings."""

import importlib
import inspect

import pytest
from house.test_public_names import EXTRAS, MODULES
from support.docstrings import lacking, lacking_of_class, public_methods


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
    assert shortcomings(module_name) == {}
