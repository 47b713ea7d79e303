"""Reads PTX: the text of a module to one of its entries."""

import re
import struct

from support.ptx.scalars import PtxError, width
from support.ptx.source.operands import (
    Address,
    Immediate,
    Inverted,
    Label,
    Operand,
    Pair,
    Register,
    Special,
    Unwanted,
    Vector,
)
from support.ptx.source.program import Entry, Guard, Instruction

_OPERAND = re.compile(r"\s*(\[[^\]]*\]|\{[^}]*\}|[^,\s][^,]*)\s*,?")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s*(?:\.\w+\s+(?:\.\w+\s+)*(?:\d+\s+)?)?([\w$]+)(?:\[(\d+)\])?"
)
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)\[(\d+)\]")
_SPECIAL = re.compile(r"%(?:tid|ntid|ctaid|nctaid|laneid|warpid|smid|clock|clock64|globaltimer)\b")
_PIECE = re.compile(
    r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<empty>;)|(?P<label>[\w$]+)\s*:(?!:)"
    r"|(?P<directive>\.(?:loc|file|section|pragma)\b[^\n;]*;?)|(?P<statement>[^;]+);)"
)


def parse(ptx: str, name: str | None = None) -> Entry:
    """Read the entry of this name, or the only one of a module.

    Raises:
        PtxError: there is no such entry, or something that is not understood.
    """
    names = re.findall(r"\.entry\s+([\w$]+)\s*\(", ptx)
    if name not in names and (name is not None or len(names) != 1):
        raise PtxError(f"entry must be one of {names}, got {name}")
    entry = Entry(name or names[0])
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.S)
    for symbol in re.findall(r"\.extern\s+\.shared\s+[^;]*?([\w$]+)\s*\[\]", text):
        entry.symbols[symbol] = 0  # the launch's own bytes, which come first here
    head, body = _split(text, re.search(rf"\.entry\s+{re.escape(entry.name)}\s*\(", text).end())
    for alignment, kind, parameter, count in _PARAMETER.findall(head):
        entry.add_parameter(parameter, kind, int(count or 1), int(alignment) if alignment else None)
    Parser(entry).read(body)
    return entry


def _split(text: str, start: int) -> tuple[str, str]:
    """Return the parameters and the body of an entry."""
    close = text.index(")", start)
    first = end = text.index("{", close)
    depth = 0
    for brace in re.finditer(r"[{}]", text[first:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            end = first + brace.start()
            break
    return text[start:close], text[first + 1 : end]


class Parser:
    """Reads the statements of one body. Braces open scopes, whose registers may hide others of the same name."""

    def __init__(self, entry: Entry) -> None:
        self.entry, self.location = entry, ""
        self.scopes: list[dict[str, str]] = [{}]
        self.num_scopes = 0

    def read(self, body: str) -> None:
        position, end = 0, len(body.rstrip())
        while position < end:
            piece = _PIECE.match(body, position)
            if piece is None:
                raise PtxError(f"statement not understood: {body[position : position + 80]}")
            position = piece.end()
            self.piece(piece)

    def piece(self, piece: re.Match) -> None:
        if piece["open"]:
            self.scopes.append({})
            self.num_scopes += 1
        elif piece["close"]:
            self.scopes.pop()
        elif piece["label"]:
            self.entry.labels[piece["label"]] = len(self.entry.instructions)
        elif piece["directive"]:
            self.location = piece["directive"] if piece["directive"].startswith(".loc") else self.location
        elif piece["statement"]:
            self.statement(piece["statement"].strip())

    def statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self.declare(*re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S).groups())
        elif shared := _SHARED.match(text):
            self.entry.add_shared(shared[3], int(shared[4]) * width(shared[2]) // 8, int(shared[1]))
        else:
            self.entry.instructions.append(self.instruction(text))

    def declare(self, kind: str, names: str) -> None:
        for name in map(str.strip, names.split(",")):
            series = re.match(r"([\w%$]+)<(\d+)>", name)
            for each in [f"{series[1]}{i}" for i in range(int(series[2]))] if series else [name]:
                unique = each if len(self.scopes) == 1 else f"{each}@{self.num_scopes}"
                self.scopes[-1][each] = unique
                self.entry.registers[unique] = width(kind)

    def instruction(self, text: str) -> Instruction:
        guard, rest = None, text
        if found := re.match(r"@(!?)([\w%$]+)\s+", text):
            guard, rest = Guard(self.register(found[2]).name, not found[1]), text[found.end() :]
        parts, operands = re.match(r"([\w.:]+)\s*(.*)", rest, re.S).groups()
        parsed = tuple(self.operand(operand.strip()) for operand in _OPERAND.findall(operands))
        return Instruction(guard, tuple(parts.split(".")), parsed, text, self.location)

    def register(self, name: str) -> Register | None:
        unique = next((scope[name] for scope in reversed(self.scopes) if name in scope), None)
        return unique and Register(unique, self.entry.registers[unique])

    def operand(self, text: str) -> Operand:
        if text.startswith("["):
            base, offset = re.match(r"\[\s*([^\s+,\]]+)\s*(?:\+\s*(-?\w+))?\s*\]$", text).groups()
            return Address(self.operand(base), int(offset or "0", 0))
        if text.startswith("{"):
            return Vector(tuple(self.operand(item.strip()) for item in text[1:-1].split(",") if item.strip()))
        if "|" in text:
            return Pair(*(self.operand(part.strip()) for part in text.split("|")))
        if text.startswith("!"):
            return Inverted(self.operand(text[1:].strip()))
        if text == "_":
            return Unwanted()
        return self.register(text) or self.named(text)

    def named(self, text: str) -> Operand:
        if _SPECIAL.match(text):
            return Special(text if "." in text or text[1:] not in ("tid", "ntid", "ctaid", "nctaid") else f"{text}.x")
        if text in self.entry.parameters:
            return Immediate(self.entry.parameters[text].start)
        if text in self.entry.symbols:
            return Immediate(self.entry.symbols[text])
        number = _number(text)
        return Label(text) if number is None else Immediate(number)


def _number(text: str) -> int | None:
    """Return the bits of a constant; None for a name."""
    if found := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text):
        return int(found[1], 16)
    if found := re.fullmatch(r"(-?(?:0[xX][0-9a-fA-F]+|\d+))U?", text):
        return int(found[1], 0)
    if re.fullmatch(r"-?\d+\.\d*", text):
        return struct.unpack("<I", struct.pack("<f", float(text)))[0]
    return {"true": 1, "false": 0}.get(text)
