"""The borders of a chat's prompt: places in its text up to which later prompts are likely to be the same.

    twin      <sys>MARK<end><user>MARK<end>                        without a generation prompt
    prompt    <sys>be brief<end><user>why?<end><bot><think>        1: other chats part here
                                      1              2             2: the next turn, if the history leaves out <think>

The twin shows the template's own text on both sides of each message. So the prompt is rendered once.
"""

from collections.abc import Sequence
from itertools import product
from os.path import commonprefix

from kvpage.server.protocol.chat_message import DEVELOPER, MARKS, SYSTEM, ChatMessage, text_mark


def borders_of(prompt: str, twin: str, messages: Sequence[ChatMessage]) -> list[int]:
    """Return how many characters are before each border, in order. A border that cannot be seen is left out.

    Args:
        prompt: The text that the messages have become.
        twin: That of their twins, without a generation prompt.
        messages: The messages.
    """
    first = next(
        (i for i, message in enumerate(messages) if message.role not in (SYSTEM, DEVELOPER) and message.texts), None
    )
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=None)
    ends = {last_user, len(messages) - 1}
    borders = [_begin_of(prompt, twin, first, messages), *(_end_of(prompt, twin, end, messages) for end in ends)]
    return sorted({border for border in borders if border is not None and border < len(prompt)})


def _begin_of(prompt: str, twin: str, index: int | None, messages: Sequence[ChatMessage]) -> int | None:
    """Return the place at which the text of a message begins."""
    mark_begin = -1 if index is None else twin.find(text_mark(index, 0))
    if index is None or mark_begin < 0:
        return None
    before, text = MARKS.split(twin[:mark_begin])[-1], messages[index].texts[0]
    begins = [prompt.find(before + shown) for shown in (text, text.strip())]
    return next((begin + len(before) for begin in begins if begin >= 0), None)


def _end_of(prompt: str, twin: str, index: int | None, messages: Sequence[ChatMessage]) -> int | None:
    """Return the place up to which later prompts repeat the text after a message, once it is answered."""
    if index is None or not messages[index].texts:
        return None
    mark, text = text_mark(index, len(messages[index].texts) - 1), messages[index].texts[-1]
    _, is_shown, rest = twin.rpartition(mark)
    if not is_shown:
        return None
    after, ending = MARKS.split(rest)[0], _ending(twin, index, messages)
    for shown, known in product((text, text.strip()), (after, "")):
        if (begin := prompt.rfind(shown + known)) >= 0:
            end = begin + len(shown)
            return end + len(commonprefix([prompt[end:], ending]))
    return None


def _ending(twin: str, index: int, messages: Sequence[ChatMessage]) -> str:
    """Return the template's text between a message and its answer, once that is in the history.

    An earlier answer to a message of its role shows it. Without one, the end of the chat is the begin of it.
    """
    for i in range(index - 1, 0, -1):
        if messages[i].role == "assistant" and messages[i].texts and messages[i - 1].role == messages[index].role:
            before, is_shown, _ = twin.partition(text_mark(i, 0))
            if is_shown:
                return MARKS.split(before)[-1]
    return MARKS.split(twin)[-1]
