"""Pages of documentation: short sentences, and no path, name, test or link that does not exist."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
from support import pages

pytestmark = pytest.mark.skipif(not pages.GUIDES.is_dir(), reason="needs the source tree")
PAGES = pages.all_pages() if pages.GUIDES.is_dir() else []
NAMES = [str(page.relative_to(pages.ROOT)) for page in PAGES]
MOST_WORDS = 25
BAD_STARTS = ("What", "Who", "Whoever", "Of", "As", "Besides")
FOLDERS = ("kvpage/", "csrc/", "kernels/", "tests/", "docs/", "benchmarks/", "examples/", ".ci/")
MOVED = "docs/changelog.md"  # names what was, too


@pytest.fixture(params=PAGES, ids=NAMES)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def present(page: Path) -> str:
    """Return a page's text, of the changelog's tables of what moved only the column of what is now."""
    text = page.read_text()
    if page != pages.ROOT / MOVED:
        return text
    return re.sub(r"^\| (.*) \| (.*) \|$", r"\2", text, flags=re.MULTILINE)


def test_sentences_are_short(page: Path) -> None:
    long = [one for one in pages.sentences(page.read_text()) if len(one.split()) > MOST_WORDS]
    assert long == []


def test_sentences_begin_plainly(page: Path) -> None:
    """A question in a heading or a cell may ask what, who or how."""
    bad = [
        one for one in pages.sentences(page.read_text())
        if one.split()[0] in BAD_STARTS and one.endswith(".") and not one.startswith("As of")
    ]  # fmt: skip
    assert bad == []


def test_sentences_are_found() -> None:
    """The tests above see paragraphs, items and cells, and count code as a word."""
    text = "# A title\n\nOne fact. `a b c` is two\nwords.\n\n- an item\n\n| a cell | two words |\n|---|---|\n\n    code"
    assert list(pages.sentences(text)) == [
        "A title", "One fact.", "CODE is two\nwords.", "an item", "a cell", "two words",
    ]  # fmt: skip


def test_paths_exist(page: Path) -> None:
    named = [word for code in pages.inline_code(present(page)) for word in code.split() if word.startswith(FOLDERS)]
    missing = [word for word in named if not any(pages.ROOT.glob(word.partition("::")[0].rstrip("/,")))]
    assert missing == []


def test_named_tests_exist(page: Path) -> None:
    """A row such as `tests/a/test_b.py::test_c` names a function of that file."""
    for path, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
        assert re.search(rf"^ *def {test}\(", (pages.ROOT / path).read_text(), re.MULTILINE), f"{path}::{test}"
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    security = (pages.ROOT / "tests" / "reliability" / "test_security.py").read_text()
    assert named <= set(re.findall(r"^ *def (\w+)\(", security, re.MULTILINE)), "tests without a file are of security"


def test_every_test_of_a_promise_of_security_is_named() -> None:
    named = set(re.findall(r"`(test_\w+)`", (pages.ROOT / "docs" / "security.md").read_text()))
    security = (pages.ROOT / "tests" / "reliability" / "test_security.py").read_text()
    assert set(re.findall(r"^def (test_\w+)\(", security, re.MULTILINE)) == named


def test_links_lead_somewhere(page: Path) -> None:
    for target in pages.links(page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.is_file(), f"{target} of {page.name}"
        assert not anchor or anchor in pages.anchors(linked.read_text()), f"{target} of {page.name}"


def test_dotted_names_exist(page: Path) -> None:
    """Names such as `kvpage.ops.check_device`, and those that `from kvpage import` asks for."""
    codes = pages.inline_code(present(page))
    for code in codes:
        if re.fullmatch(r"from [\w.]+ import \w+", code):
            _, module, _, name = code.split()
            assert resolve(f"{module}.{name}") is not None
    for name in set(re.findall(r"\bkvpage(?:\.\w+)+", " ".join(codes))):
        resolve(name)


def resolve(name: str) -> object:
    """Return the module or attribute of this dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not ".".join(parts).startswith(str(error.name)):
                pytest.skip(f"needs {error.name}")
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


def test_every_public_module_is_in_the_reference() -> None:
    """The reference has each module that exports names, and the pages of the site are all reachable."""
    described = {name for path in (pages.GUIDES / "api").glob("*.md")
                 for name in re.findall(r"^::: (\S+)$", path.read_text(), re.MULTILINE)}  # fmt: skip
    from house import test_public_names

    assert described >= set(test_public_names.MODULES)
    site = (pages.ROOT / "mkdocs.yml").read_text()
    for path in pages.GUIDES.rglob("*.md"):
        assert f"- {path.relative_to(pages.GUIDES)}\n" in site, path.name


def test_functions_that_are_assigned_are_in_the_reference() -> None:
    """`name = make(...)` has no docstring in the sources, so a page of the reference names it, or shows its module."""
    from house import test_public_names

    pages_text = "".join(path.read_text() for path in (pages.GUIDES / "api").glob("*.md"))
    named = set(re.findall(r"\w+", pages_text))
    shown = set(
        re.findall(r"^::: (\S+)\n    options:\n      heading_level: 3\n      filters:", pages_text, re.MULTILINE)
    )
    for module_name in test_public_names.MODULES:
        module = test_public_names.load(module_name)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isroutine(value) and _is_assigned(Path(str(module.__file__)), name):
                is_shown = name in named or inspect.unwrap(value).__module__ in shown
                assert is_shown, f"{module_name}.{name} is assigned; docs/api must show its function"


def _is_assigned(path: Path, name: str) -> bool:
    """Return whether a name at the top of this file is assigned, here or where the file imports it from."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", None) for target in node.targets] == [name]:
            return True
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            source = importlib.import_module(str(node.module)).__file__
            return bool(source) and str(source).endswith(".py") and _is_assigned(Path(str(source)), name)
    return False
