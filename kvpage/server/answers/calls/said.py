"""Said: a part of an answer, apart: content, thoughts, and calls of tools."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class CallPart:
    """A call of a tool, or the next part of one.

    Attributes:
        index: Its place among the calls of the answer.
        call_id: Its id, with its first part; None in later ones.
        name: The tool, with its first part; None in later ones.
        arguments: The next piece of the arguments' JSON, as the model has written it.
    """

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Said:
    """A part of an answer, or all of it.

    Attributes:
        content: Text for the reader.
        reasoning: Thoughts of the model.
        calls: Calls of tools, or parts of them, by their places.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def add_call(self, index: int, call_id: str, name: str) -> None:
        """Begin a call."""
        self.calls.append(CallPart(index, call_id, name))

    def add_arguments(self, index: int, text: str) -> None:
        """Take the next piece of the arguments of the call at a place."""
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(CallPart(index))
        self.calls[-1].arguments += text

    def add(self, later: "Said") -> None:
        """Take the part that comes after this one."""
        self.content += later.content
        self.reasoning += later.reasoning
        for part in later.calls:
            if part.name is not None and part.call_id is not None:
                self.add_call(part.index, part.call_id, part.name)
            if part.arguments:
                self.add_arguments(part.index, part.arguments)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


def as_utf8(text: str) -> str:
    """Return a text with each half of a character, which JSON can name and UTF-8 has not, as an escape.

    Args:
        text: Out of parsed JSON.
    """
    return text.encode("utf-8", "backslashreplace").decode()
