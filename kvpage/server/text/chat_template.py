"""ChatTemplate: the text that the messages of a chat become."""

from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from kvpage.server.protocol.errors import bad_request

NO_TEMPLATE = (
    "messages need a chat template, and the model's tokenizer has none: start the server with --chat-template FILE, "
    "or send the prompt to /v1/completions"
)


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as templates take it.

    Attributes:
        messages: Each with a role and content.
        tools: Those that the model is told of; None for none.
        add_generation_prompt: Whether the prompt ends with the begin of an answer.
        continue_final_message: Whether it ends within the last message.
        more: More arguments of the template.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    more: dict[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """A template of the server's, or the tokenizer's own.

    Args:
        template: The server's; None takes the tokenizer's.
    """

    def __init__(self, template: str | None) -> None:
        self._template = template

    def render(self, tokenizer: Any, chat: Chat) -> str:
        """Return the prompt's text. ApiError 400 if there is no template, or it refuses the messages."""
        if self._template is None and not getattr(tokenizer, "chat_template", None):
            raise bad_request(NO_TEMPLATE, param="messages", code="no_chat_template")
        own = {} if self._template is None else {"chat_template": self._template}
        try:
            text = tokenizer.apply_chat_template(
                chat.messages,
                tools=chat.tools,
                tokenize=False,
                add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
                continue_final_message=chat.continue_final_message,
                **chat.more,
                **own,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise bad_request(f"messages do not suit the chat template: {error}", param="messages") from error
        assert isinstance(text, str), "a template makes text"
        return text
