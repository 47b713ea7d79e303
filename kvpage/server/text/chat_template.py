"""ChatTemplate: the text that the messages of a chat become.

    twins of the messages ─► each ChatForm in turn ─► the first whose prompt shows every mark
    messages ─► that form ─► the prompt

A template drops without a word a message whose form it does not know. So no prompt is made unless its twin shows all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from kvpage.server.protocol.chat_message import ChatMessage
from kvpage.server.protocol.errors import ApiError, bad_request
from kvpage.server.text.chat_borders import borders_of
from kvpage.server.text.chat_form import (
    ChatForm,
    hidden_calls,
    hidden_texts,
    marks_in,
    num_nones,
    possible_forms,
    with_parts,
)

NO_TEMPLATE = (
    "messages need a chat template, and the model's tokenizer has none: start the server with --chat-template FILE, "
    "or send the prompt to /v1/completions"
)
FAILURES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    MemoryError,
)
"""The errors of a template that does not know its arguments. RecursionError is a RuntimeError."""
MAX_REASON = 300  # characters


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat.

    Attributes:
        messages: At least one.
        tools: The tools that the model is told of; None for none.
        add_generation_prompt: Whether the prompt ends with the begin of an answer.
        continue_final_message: Whether it ends within the last message.
        more: More arguments of the template.
    """

    messages: Sequence[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    def twin(self) -> "Chat":
        """Return the chat of the same shape whose texts are marks, without a generation prompt."""
        marked = [message.marked(index) for index, message in enumerate(self.messages)]
        return replace(self, messages=marked, add_generation_prompt=False)


class RenderedChat(NamedTuple):
    """The prompt of a chat.

    Attributes:
        text: Its text.
        borders: How many characters are before each place at which later prompts are likely to part from it, in order.
    """

    text: str
    borders: list[int]


class ChatTemplate:
    """A template of the server's, or the tokenizer's own.

    Args:
        template: The server's; None takes the tokenizer's.
    """

    def __init__(self, template: str | None) -> None:
        self._template = template

    def render(self, tokenizer: Any, chat: Chat) -> RenderedChat:
        """Return the prompt's text, and its borders.

        ApiError 400 if there is no template, it refuses the messages, or leaves one out.
        """
        if self._template is None and not getattr(tokenizer, "chat_template", None):
            raise bad_request(NO_TEMPLATE, param="messages", code="no_chat_template")
        form, twin = self.form_of(tokenizer, chat)
        try:
            text = self._rendered(tokenizer, chat, form)
        except FAILURES as error:
            raise _unsuitable(error) from error
        return RenderedChat(text, borders_of(text, twin, chat.messages))

    def form_of(self, tokenizer: Any, chat: Chat) -> tuple[ChatForm, str]:
        """Return the form in which the template shows every message, and the prompt of the twins in it.

        ApiError 400, by the message, for none.
        """
        twin, errors, partly = chat.twin(), list[ApiError](), list[tuple[ChatForm, str]]()
        for form in possible_forms(chat.messages):
            try:
                form, prompt = self._shown(tokenizer, twin, form)
            except FAILURES as error:
                errors.append(_unsuitable(error))
                continue
            marks = marks_in(prompt)
            calls, texts = hidden_calls(marks, chat.messages), hidden_texts(marks, chat.messages)
            if not calls and not texts:
                return form, prompt
            if not calls and all(chat.messages[index].calls for index in texts):
                partly.append((form, prompt))  # the template's way: beside calls it shows no text
            errors.append(_Hidden(chat.messages, calls, texts))
        if partly:
            return partly[0]
        raise next((error for error in errors if isinstance(error, _Hidden)), errors[0])

    def _shown(self, tokenizer: Any, twin: Chat, form: ChatForm) -> tuple[ChatForm, str]:
        """Return the form and its prompt, with content in parts for the roles that are not shown otherwise."""
        roles = {message.role for message in twin.messages if message.texts}
        try:
            prompt = self._rendered(tokenizer, twin, form)
        except FAILURES as error:
            form = with_parts(form, roles)
            try:
                return form, self._rendered(tokenizer, twin, form)
            except FAILURES:
                raise error from None  # the one about text is the plainer one
        if hidden := {twin.messages[index].role for index in hidden_texts(marks_in(prompt), twin.messages)}:
            other = with_parts(form, hidden)
            try:
                in_parts = self._rendered(tokenizer, twin, other)
            except FAILURES:
                in_parts = prompt
            if len(marks_in(in_parts)) > len(marks_in(prompt)):
                form, prompt = other, in_parts
        self._check_nones(tokenizer, twin, form, prompt)
        return form, prompt

    def _check_nones(self, tokenizer: Any, twin: Chat, form: ChatForm, prompt: str) -> None:
        """Raise ValueError for a template that prints None where a message has no content."""
        if form.no_content is None and num_nones(prompt) and any(message.is_bare_call for message in twin.messages):
            empty = self._rendered(tokenizer, twin, replace(form, no_content=""))
            if num_nones(prompt) > num_nones(empty):
                raise ValueError("content must not be none")

    def _rendered(self, tokenizer: Any, chat: Chat, form: ChatForm) -> str:
        """Return the prompt. apply_chat_template would leave out content that is none, for which some templates ask."""
        tools: Any = chat.tools  # a list is invariant to type checkers
        rendered: Any = render_jinja_template(
            conversations=[form.written(chat.messages)],
            tools=tools,
            chat_template=tokenizer.get_chat_template(self._template, chat.tools),
            add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
            continue_final_message=chat.continue_final_message,
            **(tokenizer.special_tokens_map | chat.more),
        )
        text = rendered[0][0]
        assert isinstance(text, str), "a template makes text"
        return text


class _Hidden(ApiError):
    """The error of a chat of which the template leaves something out. calls, texts: the places of such messages."""

    def __init__(self, messages: Sequence[ChatMessage], calls: Sequence[int], texts: Sequence[int]) -> None:
        index = min([*calls, *texts])
        left_out = "the tool calls" if index in calls else "the text"
        role = messages[index].role[:64]
        message = f"messages.{index}: the chat template does not show {left_out} of a message of the role {role!r}"
        super().__init__(400, message, param="messages", code="message_not_in_template")


def _unsuitable(error: BaseException) -> ApiError:
    reason = " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
    return bad_request(f"messages do not suit the chat template: {reason}", param="messages")
