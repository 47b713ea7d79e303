"""The extras of pyproject.toml: those that pages, errors and examples name exist, and `serve` has all of a server."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="reads TOML by the library of Python 3.11")

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "pyproject.toml").exists():
    pytest.skip("needs the source tree", allow_module_level=True)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NAMED = re.compile(r"(?<![\w./])(?:\.|kvpage)\[([a-z][a-z0-9,-]*)\]|the extra [`']([a-z0-9-]+)[`']")
SOURCES = (
    "*.md",
    "docs/*.md",
    ".ci/*",
    "release/*",
    "examples/*.py",
    "benchmarks/*",
    "kvpage/**/*.py",
    "pyproject.toml",
)


def requirements_of(extra: str) -> Iterator[str]:
    """Yield the names of the packages that an extra installs, those of the extras in it included."""
    for requirement in EXTRAS[extra]:
        name, extras = re.fullmatch(r"([\w.-]+)(?:\[([\w,]+)\])?.*", requirement).groups()
        if name == "kvpage":
            for each in extras.split(","):
                yield from requirements_of(each)
        else:
            yield name


def named_in(path: Path) -> set[str]:
    """Return the extras of kvpage that a file names."""
    return {name for found in NAMED.findall(path.read_text()) for name in ",".join(found).split(",") if name}


@pytest.mark.parametrize("pattern", SOURCES)
def test_extras_that_the_sources_name_exist(pattern):
    paths = [path for path in ROOT.glob(pattern) if path.is_file()]
    assert paths
    for path in paths:
        unknown = named_in(path) - set(EXTRAS)
        assert not unknown, f"{path.relative_to(ROOT)} must name extras of pyproject.toml, got {sorted(unknown)}"


def test_serve_has_all_that_the_server_needs():
    needed = {
        "fastapi",
        "pydantic",
        "uvicorn",
        "llguidance",
        "pyzmq",
        "msgpack",
        "prometheus_client",
        *EXTRAS["engine"],
    }
    assert {re.match(r"[\w-]+", each)[0] for each in needed} <= set(requirements_of("serve"))


def test_the_old_name_of_serve_installs_the_same():
    assert EXTRAS["server"] == ["kvpage[serve]"]
