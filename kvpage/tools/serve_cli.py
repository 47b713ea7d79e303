"""`kvpage serve`: its options on the command line."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpage._C import eviction_policies
from kvpage.layout.model_folder import check_model_folder

# their lists have the plural as a name
REPEATABLE = ("served_model_name", "adapter", "api_key", "allowed_host", "store")


def serve(
    model: Annotated[Path, typer.Argument(help="a local Hugging Face folder with its tokenizer")],
    host: Annotated[str, typer.Option(help="address to listen at; 0.0.0.0 for all")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen at; 0 for a free one")] = 8000,
    served_model_name: Annotated[list[str] | None, typer.Option(help="name in requests; repeatable")] = None,
    adapter: Annotated[list[str] | None, typer.Option(help="a LoRA of peft, as NAME=FOLDER; repeatable")] = None,
    weights_folder: Annotated[Path | None, typer.Option(help="of versions; needs KVPAGE_OPERATOR_KEY")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="key that clients need; or KVPAGE_API_KEY")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="a line each: a key, and its tenant or *")] = None,
    allowed_host: Annotated[list[str] | None, typer.Option(help="host name in URLs to answer to")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="a Jinja file, not the tokenizer's own")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="type of the cache, as CacheConfig names it")] = "auto",
    block_size: Annotated[int, typer.Option(help="tokens of a block")] = 16,
    num_gpu_blocks: Annotated[int | None, typer.Option(help="blocks of the device tier; else as many as fit")] = None,
    num_cpu_blocks: Annotated[int, typer.Option(help="blocks of the host tier")] = 0,
    num_window_blocks: Annotated[str, typer.Option(help="blocks of layers with windows, apart; or none")] = "auto",
    kv_cache_memory: Annotated[str | None, typer.Option(help="memory of the device tier, as 4GiB")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="part of what steps leave, for blocks")] = 0.9,
    state_memory: Annotated[str | None, typer.Option(help="memory of checkpoints of recurrent states")] = None,
    host_state_memory: Annotated[str, typer.Option(help="the same on the host, for evicted states")] = "0",
    checkpoint_every: Annotated[int, typer.Option(help="a checkpoint every N tokens, too; 0: none")] = 512,
    max_model_len: Annotated[int | None, typer.Option(help="tokens of a request at most")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="sequences that run at once")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="tokens of one step at most")] = 2048,
    max_num_waiting: Annotated[int, typer.Option(help="requests that wait at most; then 503")] = 1024,
    eviction: Annotated[str, typer.Option(help=f"what goes first: {', '.join(eviction_policies())}")] = "lru",
    pin_quota: Annotated[int, typer.Option(help="blocks that hints may pin")] = 0,
    tenant_pin_quota: Annotated[int | None, typer.Option(help="the same for one tenant")] = None,
    max_retain_priority: Annotated[int, typer.Option(help="of kv.retain, at most")] = 100,
    min_priority: Annotated[int | None, typer.Option(help="refuse a request's priority below this")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="processes, started by torchrun")] = 1,
    attention_backend: Annotated[str, typer.Option(help="on a GPU; as EngineConfig names it")] = "auto",
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="capture no CUDA graphs")] = False,
    same_bits: Annotated[bool, typer.Option("--same-bits", help="nothing beside a request changes its bits")] = False,
    enable_prefix_caching: Annotated[bool, typer.Option(help="reuse the blocks of other requests")] = True,
    generation_config: Annotated[str, typer.Option(help="defaults: served, model or ignore")] = "served",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="run the folder's Python")] = False,
    store: Annotated[list[str] | None, typer.Option(help="URL of a store's tier; repeatable")] = None,
    store_chunk_size: Annotated[int, typer.Option(help="tokens of a store's chunk")] = 256,
    events: Annotated[str | None, typer.Option(help="publish the cache's events, as tcp://127.0.0.1:5557")] = None,
    events_topic: Annotated[str, typer.Option(help="the first frame of every event")] = "",
    events_replay: Annotated[str | None, typer.Option(help="where past events can be asked for")] = None,
    max_body_bytes: Annotated[str, typer.Option(help="bytes of a request's body at most, as 16MiB")] = "16MiB",
    max_n: Annotated[int, typer.Option(help="samples of a prompt at most")] = 128,
    max_prompts: Annotated[int, typer.Option(help="prompts of a batch at most")] = 256,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="tokens of a prompt at most")] = None,
    max_batch_tokens: Annotated[int, typer.Option(help="tokens of all prompts of a request at most")] = 2**21,
    max_scored_tokens: Annotated[int, typer.Option(help="log-probabilities of prompts in an answer at most")] = 2**20,
    max_logprobs: Annotated[int, typer.Option(help="likeliest tokens beside each at most")] = 20,
    max_open_requests: Annotated[int, typer.Option(help="requests at once; then 503")] = 2048,
    max_open_bytes: Annotated[str | None, typer.Option(help="bytes of the bodies of all of them; then 503")] = None,
    drain_timeout: Annotated[float, typer.Option(help="seconds to finish requests in after SIGTERM")] = 30.0,
    access_log: Annotated[bool, typer.Option("--access-log", help="log each request")] = False,
    strict_fields: Annotated[bool, typer.Option("--strict-fields", help="refuse fields that are not served")] = False,
    open_metrics: Annotated[bool, typer.Option(help="answer /metrics without a key")] = True,
) -> None:
    """Serve a model with OpenAI's API. It needs the extra `serve`."""
    run_with(dict(locals()))


def run_with(options: dict[str, Any]) -> None:
    """Serve with the options of the command line. SystemExit with a line that says why it cannot."""
    options |= {f"{name}s": tuple(options.pop(name) or ()) for name in REPEATABLE}
    try:
        check_model_folder(options["model"])  # the imports below take seconds
    except ValueError as error:
        raise SystemExit(f"kvpage serve: {error}") from error
    try:
        from kvpage.server.command.options import ServeOptions
        from kvpage.server.command.serve import serve as run
    except ModuleNotFoundError as error:
        message = f"kvpage serve needs the extra 'serve': pip install 'kvpage[serve]' ({error.name} is missing)"
        raise SystemExit(message) from error
    try:
        run(ServeOptions(**options))
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise SystemExit(f"kvpage serve: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Return an error's text as one line."""
    return re.sub(r"\s+", " ", str(error)).strip()
