"""AnswerParser: the text of one answer to thoughts, content and calls of tools, as it comes.

    feed("Let me see.\\n<tool_c")  ─► content "Let me see."
    feed('all>{"name": "look", ')  ─►
    feed('"arguments": {"ci')      ─► call "look", arguments '{"ci'

A parser is one pass over the text, written as a generator that yields wherever it needs more. So the parts do not
depend on where the text is cut. Text that may be the begin of a mark waits for its rest. Blanks beside marks belong
to them.

A call is one from its name and the begin of its arguments on; a begin that goes on in another way is content. All that
follows is arguments, JSON or not, as with OpenAI: nothing of an answer is lost.
"""

import secrets
import string
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import regex

from kvpage.server.answers.calls.said import Said

Pattern = Any  # of the library regex, which knows partial matches
Wait = Generator[None, None, Any]
Marks = TypeVar("Marks")
BLANKS = r"\s{0,8}"
"""Blanks beside marks. They are few, so that text of blanks does not wait without end."""
OPEN_THOUGHT = regex.compile(BLANKS + "<think>")
CLOSE_THOUGHT = regex.compile(BLANKS + "</think>")
IN_JSON = regex.compile(r'["{}\[\]]|[^\s\w+\-.,:]')
"""The next place at which JSON changes its depth, begins a string, or is none any more."""
IN_STRING = regex.compile(r'["\\]')
LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Asked:
    """The facts of a request that a parser needs.

    Attributes:
        tools: The parameters' schemas of the tools that may be called, by name. None at all: no call is looked for.
        thinks: Whether the model may think.
        in_thought: Whether the prompt ends within a thought.
        hides_thoughts: Whether thoughts are left out.
        one_call: Whether only the first call is taken.
        prompt: The text of the prompt.
        short_ids: Whether ids of calls have nine characters, as some templates demand.
    """

    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    thinks: bool = False
    in_thought: bool = False
    hides_thoughts: bool = False
    one_call: bool = False
    prompt: str = ""
    short_ids: bool = False


class AnswerParser:
    """Parses one answer. This one knows thoughts alone.

    Args:
        asked: The facts of the request.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self._text, self._is_over, self._said = "", False, Said()
        self._num_calls, self._is_dropped = 0, False
        self._pass: Wait = self._parse()

    def feed(self, text: str) -> Said:
        """Take the next text.

        Args:
            text: Any piece of the answer.

        Returns:
            The parts of the answer that no later text can change, after those of earlier calls.
        """
        self._text += text
        next(self._pass, None)
        said, self._said = self._said, Said()
        return said

    def finish(self) -> Said:
        """End the answer.

        Returns:
            The rest.
        """
        self._is_over = True
        return self.feed("")

    # --- the pass ----------------------------------------------------------------------------------------------------

    def _parse(self) -> Wait:
        if self.asked.thinks:
            yield from self._think()
        if self.asked.tools:
            yield from self._answer()
        yield from self._rest()

    def _think(self) -> Wait:
        if self.asked.in_thought or (yield from self._matched(OPEN_THOUGHT)):
            yield from self._skip_blanks()
            yield from self._until(CLOSE_THOUGHT, self._add_thought)
            yield from self._skip_blanks()

    def _answer(self) -> Wait:
        """Parse content and calls. Other formats have their own."""
        yield from self._rest()

    def _rest(self) -> Wait:
        """Take all that comes as content."""
        while True:
            self._add_content(self._text)
            self._text = ""
            if self._is_over:
                return
            yield

    # --- steps of it -------------------------------------------------------------------------------------------------

    def _until(self, pattern: Pattern, take: Callable[[str], None]) -> Wait:
        """Hand out the text before the next match; return the match, or None at the end. Its group `rest` stays."""
        while True:
            match = pattern.search(self._text, partial=not self._is_over)
            begin = len(self._text) if match is None else match.start()
            take(self._text[:begin])
            if match is not None and not match.partial:
                self._leave(match)
                return match
            self._text = self._text[begin:]
            if self._is_over:
                return None
            yield

    def _matched(self, pattern: Pattern) -> Wait:
        """Return the match at the begin of the text, which is taken but for its group `rest`; None for none."""
        while (match := pattern.match(self._text, partial=not self._is_over)) is not None and match.partial:
            yield
        if match is not None:
            self._leave(match)
        return match

    def _leave(self, match: Any) -> None:
        has_rest = "rest" in match.re.groupindex and match["rest"] is not None
        self._text = self._text[match.start("rest") if has_rest else match.end() :]

    def _skip_blanks(self) -> Wait:
        """Drop the blanks that come next."""
        while not (text := self._text.lstrip()) and not self._is_over:
            self._text = ""
            yield
        self._text = text

    def _json(self) -> Wait:
        """Hand out the object or list that begins here, as arguments. It ends, too, where it is no JSON any more."""
        depth, pattern = 0, IN_JSON
        while True:
            end = 0
            while (match := pattern.search(self._text, end)) is not None:
                mark, end = match.group(), match.end()
                if pattern is IN_STRING and mark == "\\":
                    if end == len(self._text):  # the escaped character is not here yet
                        end -= 1
                        break
                    end += 1
                elif mark == '"':
                    pattern = IN_JSON if pattern is IN_STRING else IN_STRING
                elif mark in "{[":
                    depth += 1
                elif mark in "}]":
                    depth -= 1
                    if not depth:
                        return self._take_arguments(end)
                else:
                    return self._take_arguments(match.start())
            self._take_arguments(end if match is not None else len(self._text))
            if self._is_over:
                return self._take_arguments(len(self._text))
            yield

    # --- parts -------------------------------------------------------------------------------------------------------

    def _add_content(self, text: str) -> None:
        self._said.content += text

    def _add_thought(self, text: str) -> None:
        if not self.asked.hides_thoughts:
            self._said.reasoning += text

    def _begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call. Later calls than the first one are dropped where only one may be."""
        self._is_dropped = self.asked.one_call and self._num_calls > 0
        self._num_calls += 1
        if not self._is_dropped:
            self._said.add_call(self._num_calls - 1, call_id or self._new_id(), name)

    def _add_arguments(self, text: str) -> None:
        if text and not self._is_dropped:
            self._said.add_arguments(self._num_calls - 1, text)

    def _take_arguments(self, end: int) -> None:
        self._add_arguments(self._text[:end])
        self._text = self._text[end:]

    def _new_id(self) -> str:
        if self.asked.short_ids:
            return "".join(secrets.choice(LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


class MarkedCalls(AnswerParser, Generic[Marks]):
    """Parses answers whose calls stand between marks.

    Args:
        asked: The facts of the request.
        marks: How calls are written.
    """

    def __init__(self, asked: Asked, marks: Marks) -> None:
        self._marks = marks
        super().__init__(asked)
