"""Guide: the form that generated text must have."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

GuideKind = Literal["json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Guide:
    """A form of text: only tokens that fit it are generated, and the sequence ends where the form does.

    Make it by one of the class methods. It needs the extra `guided`, and the tokenizer given to `Engine.from_model`.
    The engine compiles it in `add_request`, and keeps what it has compiled for later requests with an equal guide.

    An end-of-sequence token comes only where the form may end. A text that `max_tokens` ends is not
    whole.

    Attributes:
        kind: "json_schema", "regex", "choice" or "grammar".
        source: Its text; JSON for a schema and for choices.
        compact: For a schema: no white space outside of strings.

    Raises:
        ValueError: The kind is none of these, or the source is empty.
        TypeError: An argument is of another type.
    """

    kind: GuideKind
    source: str
    compact: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(GuideKind):
            raise ValueError(f"kind must be one of {', '.join(get_args(GuideKind))}, got {self.kind!r}")
        if not isinstance(self.source, str):
            raise TypeError(f"source must be a str, got {type(self.source).__name__}")
        if not isinstance(self.compact, bool):
            raise TypeError(f"compact must be True or False, got {type(self.compact).__name__}")
        if not self.source:
            raise ValueError("source must not be empty, got ''")

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any] | bool, *, compact: bool = False) -> "Guide":
        """Return the guide for JSON that a schema describes.

        Args:
            schema: A JSON schema: a mapping, or its JSON text. True allows any JSON. Keywords that are not supported
                are refused by `add_request`.
            compact: Allow no white space outside of strings. Else there may be a space, or a new line and 20 blanks.

        Returns:
            The guide.

        Raises:
            ValueError: The text is no JSON, or no schema.
            TypeError: It is of another type.
        """
        if not isinstance(schema, str | Mapping | bool):
            raise TypeError(f"schema must be a mapping or JSON text, got {type(schema).__name__}")
        try:
            plain = json.loads(schema) if isinstance(schema, str) else schema
            source = json.dumps(plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"schema must be JSON: {error}") from error
        if plain is False:
            raise ValueError("schema must allow something, got false")
        if not isinstance(plain, Mapping) and plain is not True:
            raise ValueError(f"schema must be an object or true, got {source[:80]}")
        return cls("json_schema", "{}" if plain is True else source, compact)

    @classmethod
    def json_object(cls, *, compact: bool = False) -> "Guide":
        """Return the guide for any JSON object.

        Args:
            compact: See `json_schema`.

        Returns:
            The guide.
        """
        return cls("json_schema", '{"type": "object"}', compact)

    @classmethod
    def regex(cls, pattern: str) -> "Guide":
        """Return the guide for texts that match a regular expression as a whole.

        Args:
            pattern: In the syntax of Rust's `regex`: without look-around and back-references.

        Returns:
            The guide.

        Raises:
            ValueError: It is empty.
            TypeError: It is no text.
        """
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> "Guide":
        """Return the guide for exactly one of some texts.

        Args:
            choices: The texts, at least one, none of them empty.

        Returns:
            The guide.

        Raises:
            ValueError: There are none, or one is empty.
            TypeError: They are one text, or no texts.
        """
        if isinstance(choices, str | bytes) or not isinstance(choices, Sequence):
            raise TypeError(f"choices must be a list of texts, got {type(choices).__name__}")
        if others := [choice for choice in choices if not isinstance(choice, str)]:
            raise TypeError(f"choices must be texts, got {others[0]!r}")
        if not choices or not all(choices):
            raise ValueError(f"choices must be at least one text, none of them empty, got {list(choices)!r}")
        return cls("choice", json.dumps(list(choices)))

    @classmethod
    def grammar(cls, source: str) -> "Guide":
        """Return the guide for texts of a context-free grammar.

        Args:
            source: A grammar in Lark's form, whose first rule is `start`; or in EBNF as llama.cpp has it (GBNF), whose
                first rule is `root`.

        Returns:
            The guide.

        Raises:
            ValueError: It is empty.
            TypeError: It is no text.
        """
        return cls("grammar", source)
