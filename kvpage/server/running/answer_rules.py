"""AnswerRules: how the answer to a chat is guided, and how it is parsed.

tool_choice required, or a name    a guide for calls of these tools
tools and a form of JSON           a guide for calls, or the form in their place
tools with strict: true            a guide for calls wherever one begins, with any text before
other forms                        the guide of the form
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from kvpage.server.answers.calls.answer_parser import AnswerParser, Asked
from kvpage.server.answers.calls.grammar import CallGrammar, CallRules, GuidedTool, Thoughts
from kvpage.server.answers.calls.syntax import BARE, THOUGHT_MARKS, AnswerSyntax
from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.protocol.errors import bad_request
from kvpage.server.protocol.sampling_fields import ResponseFormat
from kvpage.server.protocol.tools import REQUIRED, Tool
from kvpage.serving import Guide

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
FORMAT_FIELD, TOOLS_FIELD = "response_format", "tools"


class AnswerRules:
    """The rules for the answer to one chat.

    Args:
        syntax: The format of the model.
        body: The request.
        prompt: The text of the prompt.

    Raises:
        ApiError: 400 for a form that no call can have.
    """

    def __init__(self, syntax: AnswerSyntax, body: ChatRequest, prompt: str) -> None:
        self._body, self._prompt, self._tools = body, prompt, body.callable_tools
        self._must_call = body.choice.mode == REQUIRED
        has_text = syntax.text is not None or not self._must_call
        self._syntax = syntax if has_text else replace(BARE, thinks=syntax.thinks)
        field = body.form_field
        self._form = _form_of(body.response_format) if self._tools and field == FORMAT_FIELD else None
        if self._must_call and field not in (None, FORMAT_FIELD):
            raise bad_request(f"tool_choice must not demand a call beside {field}", param="tool_choice")

    @property
    def guide_field(self) -> str | None:
        """The field for which there is a guide of calls; None for no such guide."""
        if self._must_call:
            return "tool_choice"
        if not self._tools or not self._syntax.knows_calls:
            return None
        if self._form is not None:
            return FORMAT_FIELD
        is_strict = any(tool.function.strict for tool in self._tools)
        return TOOLS_FIELD if is_strict and self._body.form_field is None else None

    def guide(self, tokenizer: Any) -> Guide | None:
        """Return the guide of calls; None where calls cannot be guided without a change of other text.

        tokenizer: The model's.
        """
        grammar = CallGrammar(self._syntax, tokenizer)
        if self.guide_field == TOOLS_FIELD and not (grammar.begins_with_token and can_guide(tokenizer)):
            return None
        many = self._body.parallel_tool_calls and not self._body.choice.is_named
        form = None if self._must_call else self._form
        tools = [_guided(tool, self._must_call or form is not None) for tool in self._tools]
        return Guide.grammar(grammar.written(CallRules(tools, many, self._thoughts, self._must_call, form)))

    @property
    def _thoughts(self) -> Thoughts:
        end = self._prompt.rstrip()
        asked = self._body.template_arguments
        is_off = asked.get("enable_thinking") is False or asked.get("reasoning_effort") == "none"
        if not self._syntax.thinks or is_off or end.endswith(THOUGHT_MARKS[1]):
            return "none"
        return "open" if self._ends_in_thought else "may"

    @property
    def _ends_in_thought(self) -> bool:
        return self._syntax.thinks and self._prompt.rstrip().endswith(THOUGHT_MARKS[0])

    def parser(self) -> AnswerParser | None:
        """Return a parser for one sample; None where all of an answer is content."""
        body, syntax = self._body, self._syntax
        parses = syntax.knows_calls or self._must_call
        tools = {tool.function.name: tool.function.parameters or {} for tool in self._tools} if parses else {}
        if not tools and not syntax.thinks:
            return None
        has_other_form = body.form_field is not None and self.guide_field is None
        asked = Asked(
            tools,
            thinks=syntax.thinks and body.separate_reasoning,
            in_thought=self._ends_in_thought and not has_other_form,
            hides_thoughts=not body.include_reasoning,
            one_call=not body.parallel_tool_calls or body.choice.is_named,
            prompt=self._prompt,
            short_ids=syntax.short_ids,
        )
        return syntax.make(asked)


def can_guide(tokenizer: Any) -> bool:
    """Return whether answers can be guided: with the library for guides, and a tokenizer that it reads.

    tokenizer: The model's.
    """
    return find_spec("llguidance") is not None and hasattr(tokenizer, "backend_tokenizer")


def _guided(tool: Tool, follows_schema: bool) -> GuidedTool:
    function = tool.function
    schema = NO_PARAMETERS if function.parameters is None else function.parameters
    if not follows_schema and not function.strict:
        schema = {"type": "object"}
    return GuidedTool(function.name, schema, bool(function.strict))


def _form_of(asked: ResponseFormat | None) -> Mapping[str, Any] | bool | None:
    """Return the schema of a form of JSON; None for any text."""
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"type": "object"}
    if asked.json_schema is None:
        raise bad_request("response_format.json_schema is required with the type json_schema", param=FORMAT_FIELD)
    return asked.json_schema.schema_
