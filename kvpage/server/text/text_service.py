"""TextService: the tokenizer of a server, beside its event loop. It makes Prompts of texts and chats.

Text is tokenized and chats are rendered in threads. Each has a tokenizer of its own: the library's must not be used by
two threads at once.
"""

import asyncio
import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from kvpage.blocks.groups.states.marks import MIN_SAVED
from kvpage.server.protocol.errors import CONTEXT_LENGTH, ApiError, bad_request
from kvpage.server.text.chat_template import Chat, ChatTemplate

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt.

    Attributes:
        token_ids: Its tokens.
        text: Its text, where that is shown.
        borders: Numbers of tokens after which later prompts are likely to part from it, in order.
    """

    token_ids: list[int]
    text: str = ""
    borders: tuple[int, ...] = ()

    def cut(self, num_tokens: int) -> "Prompt":
        """Return the prompt with its last tokens alone, num_tokens at most."""
        num_left_out = max(len(self.token_ids) - num_tokens, 0)
        borders = tuple(border - num_left_out for border in self.borders if border > num_left_out)
        return Prompt(self.token_ids[num_left_out:], self.text, borders)

    def with_borders(self, cache_at: Sequence[int]) -> list[int]:
        """Return a caller's marks, and the borders at which a state is worth its while, in order."""
        return sorted({*cache_at, *(border for border in self.borders if border >= MIN_SAVED)})


class TextService:
    """Tokenizes text.

    Args:
        tokenizer: A tokenizer of transformers. It is copied.
        chat_template: In place of the tokenizer's own; None takes that.
        max_tokens: Tokens of a prompt at most.
        max_cut_characters: Characters at most of a text of which only the end is taken, if it could not be a prompt.
        num_threads: How many texts are tokenized at once.
    """

    def __init__(
        self, tokenizer: Any, chat_template: str | None, max_tokens: int, max_cut_characters: int, num_threads: int
    ) -> None:
        self._tokenizer, self._template, self._max_tokens = tokenizer, ChatTemplate(chat_template), max_tokens
        longest = max((len(name) for name in tokenizer.get_vocab()), default=1)
        self._max_characters = max_tokens * longest
        self._max_cut_characters = max(max_cut_characters, self._max_characters)
        self._lock = threading.Lock()
        self._copies: dict[int, Any] = {}  # by thread
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kvpage-tokenizer")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, add_special_tokens: bool, is_cut: bool = False) -> list[int]:
        """Return the tokens of a text. ApiError 400 for one that is far too long. is_cut: only its end is taken."""
        return await self._run(
            lambda tokenizer: self._encoding(tokenizer, text, add_special_tokens, is_cut)["input_ids"]
        )

    async def render(self, make_chat: Callable[[], Chat], add_special_tokens: bool, is_cut: bool = False) -> Prompt:
        """Return the prompt of a chat, as text and as tokens. make_chat: called in the thread."""

        def work(tokenizer: Any) -> Prompt:
            text, borders = self._template.render(tokenizer, make_chat())
            encoding = self._encoding(tokenizer, text, add_special_tokens, is_cut)
            places = {_num_before(tokenizer, encoding, text[:border], add_special_tokens) for border in borders}
            return Prompt(encoding["input_ids"], text, tuple(sorted(places - {0})))

        return await self._run(work)

    async def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens, special ones included."""
        return await self._run(lambda tokenizer: str(tokenizer.decode(token_ids)))

    async def _run(self, work: Callable[[Any], Result]) -> Result:
        loop = asyncio.get_running_loop()
        try:
            result = loop.run_in_executor(self._pool, lambda: work(self._thread_tokenizer()))
        except RuntimeError as error:  # the pool has ended
            raise ApiError(503, f"the server is closing: {error}") from error
        return await result

    def _thread_tokenizer(self) -> Any:
        thread_id = threading.get_ident()
        if thread_id not in self._copies:
            with self._lock:
                self._copies[thread_id] = copy.deepcopy(self._tokenizer)
        return self._copies[thread_id]

    def _encoding(self, tokenizer: Any, text: str, add_special_tokens: bool, is_cut: bool) -> Any:
        if not is_cut and len(text) > self._max_characters:  # then it is too long without a look at it
            raise too_long(f"{len(text)} characters", self._max_tokens)
        if len(text) > self._max_cut_characters:
            most = self._max_cut_characters
            message = f"prompt must have at most {most} characters with truncate_prompt_tokens, got {len(text)}"
            raise bad_request(message, param="prompt", code=CONTEXT_LENGTH)
        return tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)


def _num_before(tokenizer: Any, encoding: Any, begin: str, add_special_tokens: bool) -> int:
    """Return how many tokens of a text its begin has. encoding: of the whole text."""
    if encoding.is_fast:
        return encoding.char_to_token(len(begin)) or 0
    token_ids = tokenizer(begin, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    pairs = enumerate(zip(token_ids, encoding["input_ids"], strict=False))
    return next((i for i, (token_id, other) in pairs if token_id != other), len(token_ids))


def too_long(length: str, max_tokens: int) -> ApiError:
    """Return the error of a prompt that is longer than the model takes."""
    message = f"prompt must have at most {max_tokens} tokens, got {length}"
    return bad_request(message, param="prompt", code=CONTEXT_LENGTH)
