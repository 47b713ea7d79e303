"""Cases of tests on devices of several architectures."""

from collections.abc import Mapping
from typing import Any

import pytest

BOTH = (80, 90)


def every_case(names: str, cases: Mapping[str, tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Run a test for each case, with the fixture `device` of each of its architectures.

    Args:
        names: what the test takes besides `device`.
        cases: by name, the architectures and a value for each of the names.
    """
    rows = [
        pytest.param(arch, *values, id=f"{name}-sm_{arch}")
        for name, (archs, *values) in cases.items()
        for arch in archs
    ]
    return pytest.mark.parametrize(f"device, {names}", rows, indirect=["device"])
