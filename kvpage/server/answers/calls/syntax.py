"""AnswerSyntax: the format in which a model thinks and calls tools, and how it is found.

The tokenizer's own description comes first. Else the chat template tells the format: it has to write down the calls of
earlier answers, and so shows their marks.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvpage.server.answers.calls.answer_parser import AnswerParser, Asked
from kvpage.server.answers.calls.harmony import HarmonyParser
from kvpage.server.answers.calls.json_calls import bare, deepseek, hermes, kimi, mistral
from kvpage.server.answers.calls.template_parser import TemplateParser
from kvpage.server.answers.calls.xml_calls import glm, qwen_coder

THOUGHT_MARKS = "<think>", "</think>"
NAME, INDEX = "{name}", "{index}"
"""In the texts of a CallText: the name of the tool, and a number of the call."""


@dataclass(frozen=True, slots=True)
class CallText:
    """The text around the arguments of calls, for guides.

    Attributes:
        before, after: Around the arguments of a call.
        first, last: Around all calls.
        between: Between two of them; None where an answer has only one.
        argument: Around the value of an argument: before, with its name, and after it; None for a JSON object.
    """

    before: str
    after: str = ""
    first: str = ""
    last: str = ""
    between: str | None = ""
    argument: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """The format of a model's answers.

    Attributes:
        name: Its name, for people.
        make: Makes a parser for one answer.
        marks: Its marks, which may be special tokens. Their text is shown to the parser.
        text: How calls are written; None where that is unknown.
        knows_calls: Whether calls are parsed that no guide has forced.
        thinks: Whether the model may think, between the marks <think> and </think> or in the format's own way.
    """

    name: str
    make: Callable[[Asked], AnswerParser]
    marks: tuple[str, ...] = ()
    text: CallText | None = None
    knows_calls: bool = True
    thinks: bool = False

    @property
    def short_ids(self) -> bool:
        """Whether ids of calls have nine characters."""
        return self.name.startswith("mistral")

    @property
    def in_words(self) -> str:
        """The format in a sentence for people."""
        if self.knows_calls:
            return f"calls of tools are parsed: format {self.name}" + (", with thoughts" if self.thinks else "")
        calls = "the format of the model's calls of tools is unknown: only calls that tool_choice demands are parsed"
        return calls + ("; thoughts are" if self.thinks else "")


HERMES_TEXT = CallText('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", between="\n")
CODER_TEXT = CallText(
    "<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", between="\n",
    argument=("<parameter={name}>\n", "\n</parameter>\n"),
)  # fmt: skip
GLM_TEXT = CallText(
    "<tool_call>{name}\n", "</tool_call>", between="\n",
    argument=("<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"),
)  # fmt: skip
KIMI_TEXT = CallText(
    "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
)  # fmt: skip
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_TEXT = CallText(
    "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>", CALLS_BEGIN, CALLS_END
)  # fmt: skip
DEEPSEEK_3_TEXT = CallText(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    CALLS_BEGIN,
    CALLS_END,
    "\n",
)
MISTRAL_TEXT = CallText("[TOOL_CALLS]{name}[ARGS]")
MISTRAL_LIST_TEXT = CallText('{"name": "{name}", "arguments": ', "}", "[TOOL_CALLS] [", "]", ", ")
HARMONY_TEXT = CallText("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", between=None)
LLAMA_TEXT = CallText('{"name": "{name}", "parameters": ', "}", between="; ")
BARE_TEXT = CallText('{"name": "{name}", "arguments": ', "}", between="; ")

HERMES_MARKS = "<tool_call>", "</tool_call>"
HARMONY_MARKS = "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"
DEEPSEEK_MARKS = CALLS_BEGIN, CALLS_END, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
KIMI_MARKS = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)  # fmt: skip
MISTRAL_MARKS = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
BARE = AnswerSyntax("none", bare, (), BARE_TEXT, knows_calls=False)
KNOWN: tuple[tuple[tuple[str, ...], AnswerSyntax], ...] = (
    (("<|channel|>", "<|message|>"), AnswerSyntax("gpt-oss", HarmonyParser, HARMONY_MARKS, HARMONY_TEXT, thinks=True)),
    (("<function=", "<parameter="), AnswerSyntax("qwen3-coder", qwen_coder, HERMES_MARKS, CODER_TEXT)),
    (("<tool_call>", "<arg_key>"), AnswerSyntax("glm", glm, (*HERMES_MARKS, "<arg_key>", "</arg_key>", "<arg_value>",
                                                             "</arg_value>"), GLM_TEXT)),
    (("<tool_call>",), AnswerSyntax("hermes", hermes, HERMES_MARKS, HERMES_TEXT)),
    (("<|tool_call_begin|>",), AnswerSyntax("kimi", kimi, KIMI_MARKS, KIMI_TEXT)),
    (("<｜tool▁call▁begin｜>", "```json"), AnswerSyntax("deepseek-v3", deepseek, DEEPSEEK_MARKS, DEEPSEEK_3_TEXT)),
    (("<｜tool▁call▁begin｜>",), AnswerSyntax("deepseek", deepseek, DEEPSEEK_MARKS, DEEPSEEK_TEXT)),
    (("[TOOL_CALLS]", "[ARGS]"), AnswerSyntax("mistral", mistral, MISTRAL_MARKS, MISTRAL_TEXT)),
    (("[TOOL_CALLS]",), AnswerSyntax("mistral-list", mistral, MISTRAL_MARKS, MISTRAL_LIST_TEXT)),
    (('"parameters": ', "tool_calls", "<|start_header_id|>"),
     AnswerSyntax("llama3", bare, ("<|python_tag|>",), LLAMA_TEXT)),
)  # fmt: skip
"""Texts in a chat template, and the format of templates that have all of them. The first one counts."""


def syntax_of(tokenizer: Any, chat_template: str | None) -> AnswerSyntax:
    """Return the format of a model's answers.

    Args:
        tokenizer: The model's tokenizer.
        chat_template: The template in place of the tokenizer's own; None for that one.

    Returns:
        The format; where none is known, one of thoughts alone.
    """
    template = chat_template or template_text(tokenizer)
    known = next((syntax for texts, syntax in KNOWN if all(text in template for text in texts)), BARE)
    if getattr(tokenizer, "response_template", None) is not None and hasattr(tokenizer, "get_response_parser"):
        make = functools.partial(TemplateParser, tokenizer=tokenizer)
        text = known.text if known.knows_calls else None
        return AnswerSyntax("the tokenizer's", make, special_marks(tokenizer), text, thinks=True)
    if not known.thinks and THOUGHT_MARKS[1] in template:
        return replace(known, marks=(*known.marks, *THOUGHT_MARKS), thinks=True)
    return known


def ids_of_marks(syntax: AnswerSyntax, tokenizer: Any) -> frozenset[int]:
    """Return the special tokens that are marks of a format, without those that end an answer.

    Args:
        syntax: The format.
        tokenizer: The model's tokenizer.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marks = {token_id for token_id, token in added.items() if token.special and token.content in syntax.marks}
    return frozenset(marks - {getattr(tokenizer, "eos_token_id", None)})


def template_text(tokenizer: Any) -> str:
    """Return the text of a tokenizer's chat templates, "" for none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)


def special_marks(tokenizer: Any) -> tuple[str, ...]:
    """Return all special tokens of a tokenizer, since its own description may name any."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return tuple(token.content for token in added if token.special)
