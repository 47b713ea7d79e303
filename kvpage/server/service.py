"""Service: the parts of a server that its routes use."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from starlette.requests import Request
from transformers import PreTrainedTokenizerBase

from kvpage.server.access.keys import Caller
from kvpage.server.access.request_log import HttpCounts
from kvpage.server.answers.calls.syntax import ids_of_marks, syntax_of
from kvpage.server.config import ServerConfig
from kvpage.server.metrics.latencies import Latencies
from kvpage.server.page.feed import Feed
from kvpage.server.protocol.errors import ApiError, bad_request, busy
from kvpage.server.running.explainer import Explainer
from kvpage.server.running.kept_responses import KeptResponses
from kvpage.server.running.open_requests import OpenRequests, Place
from kvpage.server.running.runner import Runner
from kvpage.server.running.sampling import ModelLimits
from kvpage.server.text.text_service import TextService
from kvpage.server.text.vocabulary import Vocabulary
from kvpage.serving import AsyncEngine

Result = TypeVar("Result")
logger = logging.getLogger(__name__)
NUM_COMPILERS = 2  # threads that compile the forms of answers
BODIES_AT_ONCE = 16
"""Bodies of the greatest length that are open at once, unless the configuration tells otherwise."""


class Service:
    """The parts of a server.

    Args:
        engine: The engine.
        tokenizer: The model's tokenizer.
        config: Names, keys and limits.

    Attributes:
        engine: The engine.
        tokenizer: The tokenizer; for the thread of the event loop, and for decoding only.
        config: Names, keys and limits.
        text: Tokenizes text, and renders chats.
        vocabulary: The tokens one by one.
        syntax: The format in which the model thinks and calls tools.
        mark_ids: Special tokens that are marks of it.
        runner: Runs jobs.
        explainer: Explains prompts.
        latencies: Times of requests.
        http: Counts of HTTP requests.
        feed: Pictures for the page.
        limits: Limits and defaults of the model.
        max_prompt_tokens: Tokens of a prompt at most.
        open_requests: The requests that are open.
        responses: The last answers of /v1/responses.
        is_draining: Whether the server takes no more requests, and finishes the requests under way.
        created: Seconds of the Unix epoch when it was made.
    """

    def __init__(self, engine: AsyncEngine, tokenizer: PreTrainedTokenizerBase, config: ServerConfig) -> None:
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        core = engine.engine
        longest = min(core.max_model_len, core.manager.num_blocks * core.manager.block_size + 1)
        self.max_prompt_tokens = min(longest - 1, config.max_prompt_tokens or longest)
        temperature = core.defaults.stated_sampling.temperature or 1.0
        self.limits = ModelLimits(longest, temperature, config.max_retain_priority)
        lengths = self.max_prompt_tokens, config.max_cut_characters
        self.text = TextService(tokenizer, config.chat_template, *lengths, config.num_tokenizer_threads)
        self.vocabulary, self.latencies, self.http = Vocabulary(tokenizer), Latencies(), HttpCounts()
        self.syntax = syntax_of(tokenizer, config.chat_template)
        self.mark_ids = ids_of_marks(self.syntax, tokenizer)
        logger.info("%s", self.syntax.in_words)
        self.feed = Feed(engine, tokenizer)
        self.runner = Runner(engine, self.latencies, self.feed.ended, config.tenant_pin_quota)
        self.explainer = Explainer(engine, self.vocabulary, self.runner.has_blocks)
        self.is_draining, self.created = False, int(time.time())
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="kvpage-compiler")
        max_bytes = config.max_open_bytes or BODIES_AT_ONCE * config.max_body_bytes
        self.open_requests = OpenRequests(config.max_open_requests, max_bytes)
        self.responses = KeptResponses(config.max_kept_responses, config.max_kept_bytes)

    @classmethod
    def of(cls, request: Request) -> "Service":
        """Return the service of the application that a request came to."""
        service = request.app.state.service
        assert isinstance(service, cls), "create_app puts it there"
        return service

    @property
    def is_healthy(self) -> bool:
        """Whether it takes requests."""
        return not self.is_draining and self.engine.takes_requests and self.engine.failure is None

    @property
    def max_num_waiting(self) -> int:
        """The prompts that may wait at most."""
        return self.engine.config.max_num_waiting

    def begin_drain(self) -> None:
        """Take no more requests from now on; requests under way go on."""
        self.is_draining = True

    def close(self) -> None:
        """End the threads. The engine stays its owner's."""
        self.text.close()
        self._compilers.shutdown(wait=False, cancel_futures=True)

    async def compile(self, work: Callable[[], Result]) -> Result:
        """Do work that takes seconds, so that nothing but other such work waits for it. ApiError 503 after the end."""
        try:
            result = asyncio.get_running_loop().run_in_executor(self._compilers, work)
        except RuntimeError as error:  # the threads have ended
            raise ApiError(503, f"the server is closing: {error}") from error
        return await result

    @contextmanager
    def open_request(self) -> Iterator[Place]:
        """Count a request, before its body is read. ApiError 503 beyond the limit, and while the server drains."""
        if self.is_draining:
            raise busy("the server is closing", 5)
        with self.open_requests.place() as open_request:
            yield open_request

    def check_ids(self, token_ids: list[int]) -> None:
        """Raise ApiError 400 for an id outside of the vocabulary."""
        size = self.engine.engine.vocab_size
        for wrong in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= wrong < size:
                raise bad_request(f"tokens must be ids in [0, {size}), got {wrong}", param="tokens")

    def check_priority(self, priority: int) -> None:
        """Raise ApiError 400 for a priority that comes before the priorities of callers."""
        least = self.config.min_priority
        if least is not None and priority < least:
            raise bad_request(f"priority must be at least {least} here, got {priority}", param="priority")

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter that a model's name asks for; None for the base model."""
        return name if name in self.config.adapter_names else None

    def check_model(self, name: str | None) -> str:
        """Return the name of the model for the answer. ApiError 404 for another one."""
        names = self.config.served_model_names
        if name is None or name in names or name in self.config.adapter_names:
            return name or names[0]
        message = f"the model {name[:80]!r} does not exist here, {names[0]!r} does"
        raise ApiError(404, message, param="model", code="model_not_found")


def caller_of(request: Request) -> Caller:
    """Return who asks, as the gate has found it."""
    caller = request.scope["caller"]
    assert isinstance(caller, Caller), "the gate puts it there"
    return caller
