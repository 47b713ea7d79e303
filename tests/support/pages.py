"""Pages of documentation as tests read them: prose, sentences, code, paths, links."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WRITTEN = re.compile(r"<!-- numbers:.*?<!-- end of numbers -->", re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def all_pages() -> list[Path]:
    """Return the README, CONTRIBUTING and every page of docs/, without those that only name modules."""
    guides = sorted(path for path in GUIDES.rglob("*.md") if path.parent.name != "api")
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *guides]


def examples(page: Path) -> list[str]:
    """Return the Python examples of a page, in their order."""
    return [code for language, code in FENCE.findall(page.read_text()) if language == "python"]


def prose(text: str) -> str:
    """Return a page's text without code blocks, figures that a program writes, and marks of Markdown."""
    text = WRITTEN.sub("", FENCE.sub("", text))
    lines = [line for line in text.splitlines() if not line.startswith("    ") and not re.match(r"\|[-|]+\|$", line)]
    text = LINK.sub(r"\1", "\n".join(lines))
    return re.sub(r"`[^`]*`", "CODE", text).replace("*", "")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page: those of its paragraphs, items, headings and cells of tables."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*[-#|]|\s*\d+\. )", prose(text))
    for block in blocks:
        for part in block.strip().strip("|").split(" | "):
            yield from filter(None, (one.strip() for one in re.split(r"(?<=[.!?])\s+", part.lstrip("-# "))))


def anchors(text: str) -> set[str]:
    """Return the anchors that the headings of a page make."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-") for title in titles}


def inline_code(text: str) -> list[str]:
    """Return the texts that a page sets in backticks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def links(text: str) -> list[str]:
    """Return the targets of a page's links."""
    return [target for _, target in LINK.findall(FENCE.sub("", text))]
