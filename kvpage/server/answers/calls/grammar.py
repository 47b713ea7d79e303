"""calls_grammar: the grammar of answers that call tools, for guides.

    start     thoughts, then calls, or a form of JSON in their place
    call      the format's text around the arguments, which obey the tool's schema

Added tokens, such as the marks of most formats, are written by their ids: as a text they would be other tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import regex

from kvpage.server.answers.calls.syntax import BARE_TEXT, INDEX, NAME, THOUGHT_MARKS, AnswerSyntax
from kvpage.server.answers.calls.xml_calls import is_text

Thoughts = Literal["none", "may", "open"]
"""Whether the answer does not think, may do so first, or begins within a thought."""
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as templates write it. Small models write blanks without end."""
HARMONY_THOUGHT = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class GuidedTool:
    """A tool in a grammar.

    Attributes:
        name: Its name.
        schema: Of its parameters; {} allows any object.
        is_strict: Whether keywords of the schema that guides do not know are refused; else they are left aside.
    """

    name: str
    schema: Mapping[str, Any]
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class CallRules:
    """Rules for the calls of an answer.

    Attributes:
        tools: The tools that may be called.
        many: Whether there may be several calls.
        thoughts: Whether there are thoughts before.
        must_call: Whether there must be a call. Else other text may be in its place, and before calls.
        form: The schema of a form in the place of calls; None for any text.
    """

    tools: Sequence[GuidedTool]
    many: bool
    thoughts: Thoughts
    must_call: bool = True
    form: Mapping[str, Any] | bool | None = None


class CallGrammar:
    """Writes grammars.

    Args:
        syntax: The format of the model.
        tokenizer: Its tokenizer.
    """

    def __init__(self, syntax: AnswerSyntax, tokenizer: Any) -> None:
        self._syntax, self._text = syntax, syntax.text or BARE_TEXT
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._ids = {token.content: token_id for token_id, token in added.items()}
        names = sorted(self._ids, key=len, reverse=True)
        self._marks = regex.compile("|".join(map(regex.escape, names)) or "(?!)")

    @property
    def begins_with_token(self) -> bool:
        """Whether calls begin with a token of their own, which is part of no text."""
        return self._marks.match(self._text.first or self._text.before) is not None

    def written(self, rules: CallRules) -> str:
        """Return the grammar in Lark's form.

        Args:
            rules: Rules for the calls. Without `must_call` and a form, calls must begin with a token of their own.

        Returns:
            The grammar.
        """
        text, names = self._text, [f"call_{number}" for number in range(len(rules.tools))]
        more = "" if text.between is None or not rules.many else f"({self.literal(text.between)} call)*"
        lines = [
            f"start: {self._start(rules)}",
            f"calls: {self.literal(text.first)} call {more} {self.literal(text.last)}",
            f"call: {' | '.join(names)}",
        ]
        for name, tool in zip(names, rules.tools, strict=True):
            lines += self._call(name, tool)
        if rules.thoughts != "none" and self._syntax.thinks:
            lines += self._thought()
        if rules.form is not None:
            lines.append(_json_rule("form", rules.form))
        return "\n".join(lines) + "\n"

    def _start(self, rules: CallRules) -> str:
        answer = "calls"
        if not rules.must_call:
            answer = "calls | form" if rules.form is not None else f"{ANY_TEXT} | {ANY_TEXT} calls"
        if rules.thoughts == "none" or not self._syntax.thinks:
            return answer
        thought = "thought" if rules.thoughts == "open" else "(thought_begin thought)?"
        return f"{thought} ({answer})"

    def _thought(self) -> list[str]:
        begin, end = HARMONY_THOUGHT if self._syntax.name == "gpt-oss" else THOUGHT_MARKS
        blanks = "" if self._syntax.name == "gpt-oss" else r"/\n{0,2}/"
        closed = self._text_until("thought_text", end)
        return [f"thought_begin: {self.literal(begin)}", f"thought: thought_text {blanks}", closed]

    def _call(self, rule: str, tool: GuidedTool) -> list[str]:
        is_json = f'"{NAME}"' in self._text.before
        shown = json.dumps(tool.name, ensure_ascii=False)[1:-1] if is_json else tool.name
        before, after = self.literal(self._text.before.replace(NAME, shown)), self.literal(self._text.after)
        lines, arguments = [f"{rule}: {before} {rule}_args {after}"], f"{rule}_args"
        if self._text.argument is None:
            return [*lines, _json_rule(arguments, {"type": "object", **tool.schema}, tool.is_strict)]
        return lines + self._tagged(arguments, tool, self._text.argument)

    def _tagged(self, rule: str, tool: GuidedTool, marks: tuple[str, str]) -> list[str]:
        """Return the rules of arguments between tags, in the schema's order."""
        schema = tool.schema
        properties = schema.get("properties")
        described = properties if isinstance(properties, dict) else {}
        required = set(schema.get("required") or ())
        names = [f"{rule}_{i}{'' if key in required else '?'}" for i, key in enumerate(described)]
        lines = [f"{rule}: {' '.join(names)}" if names else f'{rule}: ""']
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        for i, (key, value) in enumerate(described.items()):
            name, begin, end = f"{rule}_{i}", self.literal(marks[0].replace(NAME, key)), self.literal(marks[1])
            choices = value.get("enum") if isinstance(value, dict) else None
            if not is_text(schema, key):
                rules = {**value, **definitions} if isinstance(value, dict) else value
                lines += [f"{name}: {begin} {name}_json {end}", _json_rule(f"{name}_json", rules, tool.is_strict)]
            elif choices:
                lines.append(f"{name}: {begin} ({' | '.join(map(self.literal, choices))}) {end}")
            else:
                lines += [f"{name}: {begin} {name}_text", self._text_until(f"{name}_text", marks[1])]
        return lines

    # --- parts of rules ----------------------------------------------------------------------------------------------

    def literal(self, text: str) -> str:
        """Return a text as a part of a rule. The mark {index} is any number.

        Args:
            text: The text.

        Returns:
            Its parts, "" for no text.
        """
        parts, end = list[str](), 0
        for match in self._marks.finditer(text):
            parts += [*_plain(text[end : match.start()]), f"<[{self._ids[match.group()]}]>"]
            end = match.end()
        return " ".join([*parts, *_plain(text[end:])])

    def _text_until(self, rule: str, end: str) -> str:
        """Return the rule of any text up to its end, which is the first place with that text."""
        if self._marks.search(end):
            return f"{rule}: {ANY_TEXT} {self.literal(end)}"
        return f"{rule}[suffix={json.dumps(end, ensure_ascii=False)}]: {ANY_TEXT}"


def _plain(text: str) -> list[str]:
    before, is_numbered, after = text.partition(INDEX)
    if is_numbered:
        return [*_plain(before), "/[0-9]{1,3}/", *_plain(after)]
    return [json.dumps(text, ensure_ascii=False)] if text else []


def _json_rule(rule: str, schema: Mapping[str, Any] | bool, is_strict: bool = True) -> str:
    options = {"x-guidance": COMPACT | {"lenient": not is_strict}}
    rules = {**schema, **options} if isinstance(schema, Mapping) else options
    return f"{rule}: %json {json.dumps(rules)}"
