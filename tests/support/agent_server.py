# ruff: noqa: E501 - a template is read as one
"""Servers whose models speak a format of tool calls, and whose answers a guide forces, text by text."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from support.models import make_model
from support.server_app import NAME, Server, make_tokenizer
from tokenizers import AddedToken

from kvpage import CacheConfig
from kvpage.server import ServerConfig, create_app
from kvpage.server.answers.calls.grammar import CallGrammar
from kvpage.server.answers.calls.syntax import KNOWN, THOUGHT_MARKS
from kvpage.server.routes.generation import Generation
from kvpage.server.running.guides import compiled_guide
from kvpage.serving import AsyncEngine, AsyncEngineConfig, Engine, EngineConfig, Guide

ARGS = "{{ c.function.arguments | tojson }}"
CALLS = {
    "hermes": '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": ' + ARGS + "}\n</tool_call>",
    "qwen3-coder": "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
                   "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "glm": "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
           "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
    "kimi": "<|tool_call_begin|>{{ c.id }}:{{ c.function.name }}<|tool_call_argument_begin|>" + ARGS + "<|tool_call_end|>",
    "deepseek-v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n" + ARGS + "\n```<｜tool▁call▁end｜>",
    "deepseek": "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>" + ARGS + "<｜tool▁call▁end｜>",
    "mistral": "[TOOL_CALLS]{{ c.function.name }}[ARGS]" + ARGS,
    "mistral-list": '[TOOL_CALLS] [{"name": "{{ c.function.name }}", "arguments": ' + ARGS + "}]",
    "llama3": '<|start_header_id|>{"name": "{{ c.function.name }}", "parameters": ' + ARGS + "}",
    "gpt-oss": "<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>" + ARGS,
    "none": "{{ c.function.name }} {{ c.function.arguments | tojson }}",
}  # fmt: skip
"""How the template of each format shows a call."""


def template_of(name: str, thinks: bool = False) -> str:
    """Return a chat template of a format."""
    thought = (
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
        if thinks
        else ""
    )
    return (
        "{% for t in tools or [] %}<tool>{{ t.function.name }}\n{% endfor %}{% for m in messages %}<{{ m.role }}>"
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}" + CALLS[name] + "{% endfor %}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>" + thought + "{% endif %}"
    )


class AgentServer(Server):
    """A server over a tiny model, whose tokenizer has the marks of a format as tokens.

    texts: The answers that are forced, in order.
    """

    def __init__(
        self, name: str, thinks: bool = False, config: ServerConfig | None = None, special: bool = True
    ) -> None:
        self.tokenizer = make_tokenizer()
        marks = next((syntax.marks for _, syntax in KNOWN if syntax.name == name), ())
        self.tokenizer.add_tokens([AddedToken(mark, special=special) for mark in (*marks, *THOUGHT_MARKS * thinks)])
        self.tokenizer.chat_template = template_of(name, thinks)
        self.engine = make_agent_engine(self.tokenizer)
        self.live = AsyncEngine(self.engine, AsyncEngineConfig())
        self.app = create_app(self.live, self.tokenizer, config or ServerConfig([NAME]))
        self.texts: list[str] = []


def make_agent_engine(tokenizer: Any) -> Engine:
    """Return an engine for a tokenizer."""
    model = make_model("llama", vocab_size=len(tokenizer), max_position_embeddings=8192)
    config = EngineConfig(CacheConfig(block_size=4, num_gpu_blocks=2048))
    return Engine.from_model(model, config, tokenizer=tokenizer)


@contextlib.contextmanager
def agent_server(name: str, thinks: bool = False, **fields: Any) -> Iterator[AgentServer]:
    """Yield such a server; close it afterwards."""
    server = AgentServer(name, thinks, **fields)
    try:
        yield server
        assert server.live.stats().num_unfinished == 0, "a request was left behind"
    finally:
        server.live.close()
        server.app.state.service.close()


@contextlib.contextmanager
def forced(server: AgentServer, texts: Sequence[str]) -> Iterator[None]:
    """Force the next answers by guides: each request takes the next text. All are asked for within the block."""
    written, before = list(texts), Generation._compiled
    grammar = CallGrammar(server.app.state.service.syntax, server.tokenizer)

    async def compiled(generation: Generation, prompt: str) -> Any:
        guide = Guide.grammar(f"start: {grammar.literal(written.pop(0))}\n")
        return await generation._service.compile(lambda: compiled_guide(server.live, "test", lambda: guide))

    Generation._compiled = compiled  # type: ignore[method-assign]
    try:
        yield
    finally:
        Generation._compiled = before  # type: ignore[method-assign]
    assert not written, f"{len(written)} answers were not asked for"
