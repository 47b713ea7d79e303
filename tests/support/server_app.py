"""A server over a tiny random model and a tokenizer made here, called without a socket."""

import contextlib
import copy
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
from support.models import make_model
from support.tokenizers_made import byte_level

from kvpage import CacheConfig
from kvpage.server import ServerConfig, create_app
from kvpage.serving import AsyncEngine, AsyncEngineConfig, Engine, EngineConfig

TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'nobody' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
NAME = "tiny"


def make_tokenizer() -> Any:
    """Return a byte-level tokenizer with a chat template."""
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_engine(model: Any = None, num_cpu_blocks: int = 0, **fields: Any) -> Engine:
    """Return an engine over a model, or a tiny Llama with the tokenizer's vocabulary."""
    tokenizer = make_tokenizer()
    model = model or make_model("llama", vocab_size=len(tokenizer))
    cache = CacheConfig(block_size=4, num_gpu_blocks=256, num_cpu_blocks=num_cpu_blocks)
    return Engine.from_model(model, EngineConfig(cache, **fields), tokenizer=tokenizer)


class Server:
    """A server whose application is called directly.

    Attributes:
        live, engine, tokenizer, app: Its parts.
    """

    def __init__(self, config: ServerConfig, limits: AsyncEngineConfig, **fields: Any) -> None:
        self.engine, self.tokenizer = make_engine(**fields), make_tokenizer()
        self.live = AsyncEngine(self.engine, limits)
        self.app = create_app(self.live, self.tokenizer, config)

    def client(self, **headers: str) -> httpx.AsyncClient:
        """Return a client of the application."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return self.tokenizer(text)["input_ids"]

    async def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """Post JSON."""
        async with self.client(**headers) as client:
            return await client.post(path, json=body)

    async def get(self, path: str, **headers: str) -> httpx.Response:
        """Get a path."""
        async with self.client(**headers) as client:
            return await client.get(path)


@contextlib.contextmanager
def running_server(
    config: ServerConfig | None = None, limits: AsyncEngineConfig | None = None, **fields: Any
) -> Iterator[Server]:
    """Yield a server; close it afterwards."""
    server = Server(config or ServerConfig([NAME]), limits or AsyncEngineConfig(), **fields)
    try:
        yield server
    finally:
        server.live.close()
        server.app.state.service.close()


def events_of(text: str) -> list[Any]:
    """Return the objects of a stream's events. It must end with [DONE]."""
    lines = [line for line in text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def lines_of(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the lines of a stream as they come."""
    async for line in response.aiter_lines():
        if line:
            yield line
