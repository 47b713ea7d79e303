"""Places of a C++ file where one thing can stand for another, all of them written into one text.

    source ─► mask: no comments, no strings ─► edits, each of a span, one within the other or apart ─► text

An edit writes something before and after its span, or in its place; mutants.h has what is written. Relies on the
source's layout (binary operators stand between spaces), not on a parser. Left alone: messages, templates, constants of
the compiler, declarations.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
}
OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*", "%": "/", "<<": ">>", ">>": "<<", "&": "|", "|": "&"}
KEYWORDS = "return if for while else do switch case using throw const auto static delete try struct class namespace"
LEFT_OUT = re.compile(
    r"\b(constexpr|static_assert|template|using|enum|case|operator|friend|__builtin_prefetch)\b|^\s*#"
)
OPEN, CLOSE = "([{", ")]}"
WORDS = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*.*?\*/', re.S)
STATEMENT = re.compile(r"(\+\+|--)|\*?\(?[A-Za-z_][\w:]*(\.|->|\(|\[|\+\+|--|\s+([-+*/%&|]|<<|>>)?=\s)")


@dataclass(frozen=True, slots=True)
class Edit:
    """text, with {0}, {1} for the mutants' numbers and @ for what stands at begin ... end, its edits done."""

    begin: int
    end: int
    text: str
    changes: tuple[str, ...]


def instrumented(source: str, first: int) -> tuple[str, list[tuple[int, str]]]:
    """The text with every mutant, numbered from `first` on, and for each its line and what it changes."""
    edits = sorted(all_edits(source), key=lambda edit: (edit.begin, -edit.end))
    found: list[tuple[int, str]] = []
    numbers = {}
    for edit in edits:
        numbers[id(edit)] = first + len(found)
        line = source.count("\n", 0, edit.begin) + 1
        found += [(line, change) for change in edit.changes]
    text, _ = _written(source, edits, numbers, 0, 0, len(source))
    return '#include "mutants.h"\n' + text, found


def _written(
    source: str, edits: list[Edit], numbers: dict[int, int], next_edit: int, begin: int, end: int
) -> tuple[str, int]:
    """source[begin:end] with the edits from `next_edit` on that lie in it, and the first edit behind it."""
    parts = []
    while next_edit < len(edits) and edits[next_edit].begin < end:
        edit = edits[next_edit]
        assert edit.end <= end, f"edits overlap: {source[edit.begin : edit.end]}"
        parts.append(source[begin : edit.begin])
        inner, next_edit = _written(source, edits, numbers, next_edit + 1, edit.begin, edit.end)
        first = numbers[id(edit)]
        text = edit.text
        for offset in range(len(edit.changes)):
            text = text.replace(f"{{{offset}}}", str(first + offset))
        parts.append(text.replace("@", inner))
        begin = edit.end
    parts.append(source[begin:end])
    return "".join(parts), next_edit


def all_edits(source: str) -> list[Edit]:
    mask = WORDS.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)
    left_out = _left_out(mask)
    edits = []
    for edit in (*_operators(mask), *_logic(mask), *_conditions(mask), *_numbers(mask), *_statements(source, mask)):
        if not any(begin <= edit.begin < end for begin, end in left_out):
            edits.append(edit)
    return edits


def _left_out(mask: str) -> list[tuple[int, int]]:
    """Lines, and the statement that goes on from them."""
    spans, at = [], 0
    for line in mask.splitlines(keepends=True):
        if LEFT_OUT.search(line):
            spans.append((at, max(at + len(line), _end_of_statement(mask, at) if "static_assert" in line else 0)))
        at += len(line)
    for found in re.finditer(r"\b(check|require)\(", mask):  # what is checked; the words behind it are left alone
        comma = _end_of(mask, found.end(), False, stops=",")
        spans.append((comma, _end_of(mask, found.end(), False, stops="")))
    return spans


def _operators(mask: str) -> Iterator[Edit]:
    for found in re.finditer(r"(?<=\s)(<=|>=|==|!=|<<|>>|[-+*/%&|<>])(?=\s)", mask):
        op = found[1]
        others = COMPARISONS.get(op) or (OPERATORS[op],)
        changes = tuple(f"{op} becomes {other}" for other in others)
        yield Edit(*found.span(), f"{op} mutants::Operator<{{0}}>() {op}", changes)
    for found in re.finditer(r"(?<=\s)([-+])=(?=\s)", mask):
        other = {"+": "-=", "-": "+="}[found[1]]
        yield Edit(*found.span(), f"{found[0]} mutants::Negate<{{0}}>() {found[0]}", (f"{found[0]} becomes {other}",))
    for found in re.finditer(r"!(?=[\w(*:])", mask):
        yield Edit(*found.span(), "mutants::Not<{0}>() ->* ", ("no !",))
    for found in re.finditer(r"(\+\+|--)(?=[A-Za-z_(])", mask):
        kind, other = ("Increment", "--") if found[1] == "++" else ("Decrement", "++")
        yield Edit(*found.span(), f"mutants::{kind}<{{0}}>() ->* ", (f"{found[1]} becomes {other}",))
    for found in re.finditer(r"([A-Za-z_][\w.]*(?:->\w+)*)(\+\+|--)", mask):
        other = "--" if found[2] == "++" else "++"
        text = f"(mutants::is({{0}}) ? {found[1]}{other} : {found[1]}{found[2]})"
        yield Edit(*found.span(), text, (f"{found[2]} becomes {other}",))
    for found in re.finditer(r"std::(min|max)(?:<(\w+)>)?(?=\()", mask):
        other = {"min": "max", "max": "min"}[found[1]]
        text = f"mutants::{found[1]}<{{0}}{', ' + found[2] if found[2] else ''}>"
        yield Edit(*found.span(), text, (f"{found[1]} becomes {other}",))


def _logic(mask: str) -> Iterator[Edit]:
    """Each operand of && and || can be left out."""
    spans: dict[tuple[int, int], str] = {}
    for found in re.finditer(r"(?<=\s)(&&|\|\|)(?=\s)", mask):
        left = _begin_of(mask, found.start(), True), found.start()
        right = found.end(), _end_of(mask, found.end(), True)
        for begin, end in (left, right):
            span = _stripped(mask, begin, end)
            if spans.get(span) != "&&":
                spans[span] = found[1]
    for (begin, end), op in spans.items():
        text = "(mutants::is({0}) || bool(@))" if op == "&&" else "(!mutants::is({0}) && bool(@))"
        yield Edit(begin, end, text, (f"no {' '.join(mask[begin:end].split())}",))


def _conditions(mask: str) -> Iterator[Edit]:
    true, false = "the condition is true", "the condition is false"
    for found in re.finditer(r"\b(if|while)\s*\(", mask):
        begin, end = found.end(), _end_of(mask, found.end(), False, stops="")
        first = _end_of(mask, begin, False, stops=";")
        begin, end = _stripped(mask, first + 1 if first < end else begin, end)
        if re.search(r"[^=!<>]=[^=]", mask[begin:end]) and "[" not in mask[begin:end]:
            continue  # declares something
        if found[1] == "if":
            yield Edit(begin, end, "mutants::is({0}) || (!mutants::is({1}) && bool(@))", (true, false))
        else:
            yield Edit(begin, end, "!mutants::is({0}) && bool(@)", (false,))
    for found in re.finditer(r"(?<=\s)\?(?=\s)", mask):
        begin, end = _stripped(mask, _begin_of(mask, found.start(), False), found.start())
        yield Edit(begin, end, "(mutants::is({0}) || (!mutants::is({1}) && bool(@)))", (true, false))


def _numbers(mask: str) -> Iterator[Edit]:
    for found in re.finditer(r"(?<![\w.>])(?<!- )(\d+)(?![\w.'>])", mask):
        value = int(found[1])
        more = f"{value} becomes {value + 1}"
        if value == 0:
            yield Edit(*found.span(), "(mutants::is({0}) ? 1 : 0)", (more,))
        else:
            text = f"(mutants::is({{0}}) ? {value + 1} : mutants::is({{1}}) ? {value - 1} : {value})"
            yield Edit(*found.span(), text, (more, f"{value} becomes {value - 1}"))
    for found in re.finditer(r"(?<![\w\"])(true|false)(?!\w)", mask):
        other = "false" if found[1] == "true" else "true"
        yield Edit(*found.span(), f"(mutants::is({{0}}) ? {other} : {found[1]})", (f"{found[1]} becomes {other}",))


def _statements(source: str, mask: str) -> Iterator[Edit]:
    """Each that declares nothing and gives nothing back can be left out."""
    for found in re.finditer(r"(?:[;{})]|\belse)\s*(?=[A-Za-z_*+(-])", mask):
        begin = found.end()
        word = re.match(r"[A-Za-z_]*", mask[begin:])
        is_jump = re.match(r"(return|continue|break);", mask[begin:])
        if not is_jump and (not STATEMENT.match(mask, begin) or (word and word[0] in KEYWORDS.split())):
            continue
        end = _end_of_statement(mask, begin)
        is_declared = re.search(r"=\s*(delete|default);$", mask[begin:end])
        is_call = found[0].startswith(")") and not _ends_a_header(mask, found.start())
        if end == 0 or is_declared or is_call or not _in_block(mask, begin):
            continue
        yield Edit(begin, end, "{ if (!mutants::is({0})) { @ } }", ("deleted",))


def _end_of_statement(mask: str, begin: int) -> int:
    """Behind its semicolon; 0 where a block begins or ends first."""
    depth = 0
    for at in range(begin, len(mask)):
        char = mask[at]
        if char == "{" and depth == 0 and not mask[begin:at].rstrip().endswith("="):
            return 0
        depth += (char in OPEN) - (char in CLOSE)
        if depth < 0:
            return 0
        if char == ";" and depth == 0:
            return at + 1
    return 0


def _in_block(mask: str, at: int) -> bool:
    """Whether the nearest open bracket before it is {."""
    depth = 0
    for before in range(at - 1, -1, -1):
        depth += (mask[before] in CLOSE) - (mask[before] in OPEN)
        if depth < 0:
            return mask[before] == "{"
    return True


def _ends_a_header(mask: str, close: int) -> bool:
    """Whether the ) is that of an if, a for or a while."""
    depth = 0
    for at in range(close, -1, -1):
        depth += (mask[at] in CLOSE) - (mask[at] in OPEN)
        if depth == 0:
            return re.search(r"\b(if|for|while)\s*$", mask[:at]) is not None
    return False


def _begin_of(mask: str, end: int, at_logic: bool) -> int:
    """Where the expression before `end` begins; at_logic: an operand of && and ||."""
    depth = 0
    for at in range(end - 1, -1, -1):
        depth += (mask[at] in CLOSE) - (mask[at] in OPEN)
        if depth < 0 or (depth == 0 and _stops(mask, at, at_logic)):
            return at + 1
        if depth == 0 and mask.startswith("return", at) and mask[at + 6].isspace():
            return at + 6
    return 0


def _end_of(mask: str, begin: int, at_logic: bool, stops: str | None = None) -> int:
    """Where the expression from `begin` on ends; or what its bracket holds, or that up to one of `stops` in it."""
    depth = 0
    for at in range(begin, len(mask)):
        depth += (mask[at] in OPEN) - (mask[at] in CLOSE)
        if depth < 0 or (depth == 0 and (_stops(mask, at, at_logic) if stops is None else mask[at] in stops)):
            return at
    return len(mask)


def _stops(mask: str, at: int, at_logic: bool) -> bool:
    char, around = mask[at], mask[max(at - 1, 0) : at + 2]
    if char in ";,?":
        return True
    if char == ":":
        return "::" not in around
    if char == "=":
        return "==" not in around and mask[at - 1] not in "=!<>"
    return at_logic and around in ("&& ", "|| ", " &&", " ||", "&&\n", "||\n")


def _stripped(mask: str, begin: int, end: int) -> tuple[int, int]:
    while mask[begin].isspace():
        begin += 1
    while mask[end - 1].isspace():
        end -= 1
    return begin, end
