"""Forms of instructions: opcodes with all that changes what they do. Each one that a kernel uses has a test."""

import re
from collections.abc import Iterable
from pathlib import Path

_NAME = re.compile(r"(?<![\w.%])(?:[a-z]\w*(?:\.[a-zA-Z]\w*(?:::\w+)*)+|bra|ret)\b")
_WITHOUT_EFFECT = re.compile(r"\.(?:L[12]::\w+|uni)\b|(?<=\.shared)::cta")  # advice, for caches among others
_ANY_WIDTH = re.compile(r"(?<=\.m64)n\d+")


def form_of(name: str) -> str:
    """Return an instruction's name without what only advises; wgmma's is one for all widths."""
    return _ANY_WIDTH.sub("", _WITHOUT_EFFECT.sub("", name))


def forms_in(text: str) -> set[str]:
    """Return the forms of all instructions that are written out in a text, among other names with dots."""
    return {form_of(name) for name in _NAME.findall(text)}


def untested(forms: Iterable[str], tests: Iterable[Path]) -> list[str]:
    """Return those forms that no test writes out."""
    tested: set[str] = set().union(*(forms_in(path.read_text()) for path in tests))
    return sorted(set(forms) - tested)
