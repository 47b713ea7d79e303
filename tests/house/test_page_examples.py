"""Every Python example of the README and of docs/ runs, and prints the lines that its page promises."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import pages

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not pages.GUIDES.is_dir(), reason="needs the source tree")
PAGES = [page for page in (pages.all_pages() if pages.GUIDES.is_dir() else []) if pages.examples(page)]
NEEDED = {"answers.md": ("llguidance",), "events.md": ("zmq", "msgpack", "prometheus_client")}
PRINTED = {
    "quickstart.md": ["32 prompt tokens came from the cache"],
    "generate.md": ["0 of 42 tokens are not computed again", "40 of 41 tokens are not computed again"],
    "blend.md": ["102 of 124 tokens reused"],
    "store.md": ["192 of 200 tokens are in the store"],
    "replay.md": ["1024 of 2560 prompt tokens were found"],
}


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """The names that every page may use: the quickstart's model, and a prompt."""
    known: dict[str, Any] = {"__name__": "page"}
    exec(pages.examples(pages.GUIDES / "quickstart.md")[0].partition("engine =")[0], known)
    known["prompt"] = list(range(100, 140))
    yield known
    for opened in ("telemetry", "engine", "pool"):
        with contextlib.suppress(AttributeError):
            known.get(opened).close()


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_examples_of_a_page_run(
    page: Path, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for needed in NEEDED.get(page.name, ()):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    for example in pages.examples(page):
        exec(compile(example, str(page), "exec"), names)
    printed = capsys.readouterr().out
    for line in PRINTED.get(page.name, ()):
        assert line in printed


def test_the_examples_are_found() -> None:
    assert {"README.md", *PRINTED, *NEEDED} <= {page.name for page in PAGES}
