"""Service: the parts of a server that its routes use."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request
from transformers import PreTrainedTokenizerBase

from kvpage.server.access.keys import Caller
from kvpage.server.config import ServerConfig
from kvpage.server.metrics.latencies import Latencies
from kvpage.server.page.feed import Feed
from kvpage.server.protocol.errors import ApiError, bad_request, busy
from kvpage.server.running.model_limits import ModelLimits
from kvpage.server.running.runner import Runner
from kvpage.server.text.text_service import TextService
from kvpage.server.text.vocabulary import Vocabulary
from kvpage.serving import AsyncEngine


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
        runner: Runs jobs.
        latencies: Times of requests.
        feed: Pictures for the page.
        limits: Limits and defaults of the model.
        max_prompt_tokens: Tokens of a prompt at most.
        is_draining: Whether no more requests are taken, and those under way are finished.
        created: Seconds of the Unix epoch when it was made.
    """

    def __init__(self, engine: AsyncEngine, tokenizer: PreTrainedTokenizerBase, config: ServerConfig) -> None:
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        core = engine.engine
        longest = min(core.max_model_len, core.manager.num_blocks * core.manager.block_size + 1)
        self.max_prompt_tokens = min(longest - 1, config.max_prompt_tokens or longest)
        self.limits = ModelLimits(longest, core.defaults.stated_sampling.temperature or 1.0, config.max_retain_priority)
        self.text = TextService(tokenizer, config.chat_template, self.max_prompt_tokens, config.num_tokenizer_threads)
        self.vocabulary, self.latencies = Vocabulary(tokenizer), Latencies()
        self.feed = Feed(engine, tokenizer)
        self.runner = Runner(engine, self.latencies, self.feed.ended, config.tenant_pin_quota)
        self.is_draining, self.created = False, int(time.time())
        self._num_open = 0

    @classmethod
    def of(cls, request: Request) -> "Service":
        """Return the service of the application that a request came to."""
        found = request.app.state.service
        assert isinstance(found, cls), "create_app puts it there"
        return found

    @property
    def is_healthy(self) -> bool:
        """Whether it takes requests."""
        return not self.is_draining and self.engine.takes_requests and self.engine.failure is None

    def begin_drain(self) -> None:
        """Take no more requests from now on; those under way go on."""
        self.is_draining = True

    def close(self) -> None:
        """End the threads. The engine stays its owner's."""
        self.text.close()

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Count a request that generates. ApiError 503 beyond the limit, and while the server drains."""
        if self.is_draining:
            raise busy("the server is closing", 5)
        if self._num_open >= self.config.max_open_requests:
            raise busy(f"{self._num_open} requests are open, which is the most", 1)
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    def check_ids(self, token_ids: list[int]) -> None:
        """Raise ApiError 400 for an id outside of the vocabulary."""
        size = self.engine.engine.vocab_size
        if wrong := [token_id for token_id in token_ids if not 0 <= token_id < size]:
            raise bad_request(f"tokens must be ids in [0, {size}), got {wrong[0]}", param="tokens")

    def check_priority(self, priority: int) -> None:
        """Raise ApiError 400 for a priority that comes before those that callers may have."""
        least = self.config.min_priority
        if least is not None and priority < least:
            raise bad_request(f"priority must be at least {least} here, got {priority}", param="priority")

    def check_model(self, name: str | None) -> str:
        """Return the name of the model for the answer. ApiError 404 for another one."""
        names = self.config.served_model_names
        if name is None or name in names:
            return name or names[0]
        message = f"the model {name[:80]!r} does not exist here, {names[0]!r} does"
        raise ApiError(404, message, param="model", code="model_not_found")


def caller_of(request: Request) -> Caller:
    """Return who asks, as the gate has found it."""
    found = request.scope["caller"]
    assert isinstance(found, Caller), "the gate puts it there"
    return found
