"""serve: the process of `kvpage serve`, from its options to its end."""

import functools
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import transformers
import uvicorn
from jinja2 import TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from kvpage.server.app import create_app
from kvpage.server.command.bounded_http import BoundedHttp
from kvpage.server.command.draining_server import SIGNALS, DrainingServer, ended_by_signals
from kvpage.server.command.loading import Loaded, engine_config, load, load_model
from kvpage.server.command.open_files import allow_open_files
from kvpage.server.command.options import ServeOptions
from kvpage.server.config import ServerConfig
from kvpage.server.text.chat_template import FAILURES
from kvpage.serving import Engine
from kvpage.serving.live.stepping.served_engine import ServedEngine
from kvpage.store.config import parse_size

logger = logging.getLogger(__name__)
SAME_NAMES = (
    "max_n", "max_prompts", "max_prompt_tokens", "max_batch_tokens", "max_scored_tokens", "max_logprobs",
    "max_open_requests", "strict_fields", "open_metrics", "access_log",
)  # fmt: skip
CLOSING_SECONDS = 5  # that connections have to send the rest of their answers
KEEP_ALIVE_SECONDS = 65  # longer than the 60 s for which proxies keep connections


def serve(options: ServeOptions) -> None:
    """Serve until a signal comes.

    Args:
        options: The options.

    Raises:
        ValueError: An option does not fit the model, with the reason.
        OSError: The address cannot be bound, or a file cannot be read.
    """
    prepare_logs()
    if options.tensor_parallel_size > 1 and os.environ.get("RANK", "0") != "0":
        follow(options)
        return
    config = server_config(options)
    allow_open_files()
    with bound_socket(options.host, options.port) as bound, ended_by_signals():
        warn_of_open_doors(options, config)
        logger.info("loading %s", options.model)
        loaded = load(options)
        try:
            run(options, config, loaded, bound)
        finally:
            loaded.close()


def follow(options: ServeOptions) -> None:
    """Compute this process's part until the first process ends. Signals are for that one: it ends the others."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    model = load_model(options)
    Engine.follow(model, engine_config(options))


def run(options: ServeOptions, config: ServerConfig, loaded: Loaded, bound: socket.socket) -> None:
    """Serve a loaded model on a bound socket until a signal comes."""
    app = create_app(loaded.engine, loaded.tokenizer, config)
    http: Any = functools.partial(BoundedHttp, send_timeout=config.send_timeout)
    settings = uvicorn.Config(
        app,
        http=http,
        ws="none",
        log_config=None,
        access_log=False,  # RequestLog's has the time that a request took
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )

    def ready() -> None:
        print(greeting(options.host, config, loaded, bound), flush=True)

    DrainingServer(settings, app.state.service, options.drain_timeout, ready).run([bound])


def server_config(options: ServeOptions) -> ServerConfig:
    """Return the settings of the application."""
    template = None if options.chat_template is None else read_template(options.chat_template)
    return ServerConfig(
        options.names,
        options.keys(),
        options.hosts,
        template,
        max_body_bytes=parse_size(options.max_body_bytes),
        adapter_names=tuple(options.adapter_folders()),
        weights_folder=options.weights_folder,
        operator_key=options.operator_key(),
        tenant_pin_quota=options.tenant_pin_quota,
        max_retain_priority=options.max_retain_priority,
        min_priority=options.min_priority,
        max_open_bytes=None if options.max_open_bytes is None else parse_size(options.max_open_bytes),
        **{name: getattr(options, name) for name in SAME_NAMES},
    )


def read_template(path: Path) -> str:
    """Return the template in a file. ValueError for one that is none: better now than with the first chat."""
    template = path.read_text()
    try:
        render_jinja_template(conversations=[[{"role": "user", "content": "x"}]], chat_template=template)
    except TemplateSyntaxError as error:
        raise ValueError(f"--chat-template must be a Jinja template, {path} line {error.lineno}: {error}") from error
    except FAILURES:  # of a template that asks for more than this
        pass
    return template


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound, and does not listen yet: a port in use is known before the model is loaded.

    Raises:
        OSError: The address cannot be bound, with the address in the message.
    """
    try:
        [family, kind, protocol, _, address] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(f"--host must be an address of this machine, got {host!r}: {error.strerror}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(f"--host and --port must be free, {host}:{port} cannot be bound: {error.strerror}") from error
    return bound


def greeting(host: str, config: ServerConfig, loaded: Loaded, bound: socket.socket) -> str:
    """Return the text that is printed once requests are taken: the model, the URL, and a command to try it with."""
    url = url_of(host, bound)
    page = url.removesuffix("v1")
    served = f"kvpage serves {in_words(config, loaded)} at {url}, and a page at {page}"
    return f"{served}; try:\n  {first_command(url, config, loaded)}"


def first_command(url: str, config: ServerConfig, loaded: Loaded) -> str:
    """Return a command that asks for an answer: a chat, if there is a template for it."""
    has_template = config.chat_template is not None or getattr(loaded.tokenizer, "chat_template", None)
    path = "chat/completions" if has_template else "completions"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]} if has_template else {"prompt": "Hello"}
    body |= {"max_tokens": 32, "stream": True}
    key = ' -H "Authorization: Bearer $KVPAGE_API_KEY"' if config.api_keys else ""
    return f"curl -N {url}/{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def url_of(host: str, bound: socket.socket) -> str:
    """Return the URL that clients on this machine use."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    name = f"[{reached}]" if ":" in reached else reached
    return f"http://{name}:{bound.getsockname()[1]}/v1"


def in_words(config: ServerConfig, loaded: Loaded) -> str:
    """Return "tiny (LlamaForCausalLM, 4.9 M parameters, float32, cpu; 512 blocks of 16 tokens, 48 MiB)"."""
    model, engine = loaded.model, loaded.engine.engine
    num_parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    dtype = str(model.dtype).removeprefix("torch.")
    kind = f"{type(model).__name__}, {num_parameters:,.1f} M parameters, {dtype}, {engine.cache.device}"
    blocks = f"{engine.manager.num_blocks:,} blocks of {engine.manager.block_size} tokens"
    if num_bytes := bytes_of_blocks(engine):
        blocks += f", {num_bytes / 2**20:,.0f} MiB"
    return f"{config.served_model_names[0]} ({kind}; {blocks})"


def bytes_of_blocks(engine: ServedEngine) -> int:
    """Return the memory of all blocks of the device tier; 0 for a model without any."""
    tensors = getattr(engine.cache, "gpu_cache", ())
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def warn_of_open_doors(options: ServeOptions, config: ServerConfig) -> None:
    """Log a warning if others than this machine reach a server without keys."""
    if not options.is_local and not config.api_keys:
        logger.warning(
            "whoever reaches %s port %d may use this server, and needs no key: give --api-key, or --host 127.0.0.1",
            options.host,
            options.port,
        )


def prepare_logs() -> None:
    """Log warnings of all libraries and kvpage's own news to standard error; draw bars on a terminal only."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kvpage").setLevel(logging.INFO)
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
