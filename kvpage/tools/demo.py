"""`kvpage demo`: conversations with shared system prompts, served from paged blocks and checked against model.generate.

By default the model is a small Llama with seeded random weights over bytes, and the prompts are made of this project's
own documents. Each conversation has one of a few system prompts and several turns. The prompt of a turn repeats the
whole conversation before it. So the next turn finds the blocks of the last one, and all conversations find a system
prompt.
"""

import ast
import importlib.metadata
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvpage.layout.config import CacheConfig, DeviceConfig
from kvpage.serving import Engine, EngineConfig, RequestOutput, SamplingParams
from kvpage.serving.assembly.model_files import load_model_files, load_tokenizer_files
from kvpage.serving.assembly.weights_digest import weights_digest
from kvpage.serving.params.generation_defaults import unserved_fields
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.tools.demo_text import show_answers, tier_in_words
from kvpage.tools.picture_file import check_picture

NUM_SYSTEM_PROMPTS = 4
SYSTEM_BYTES, TURN_BYTES = 768, 96


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the command line; see `kvpage demo --help`."""

    model: Path | None = None
    prompts: Path | None = None
    num_requests: int = 96
    num_turns: int = 3
    max_tokens: int = 24
    num_blocks: int = 768
    block_size: int = 16
    layer_layout: str = "separate"
    num_checked: int = 6
    seed: int = 0
    device: str = "cpu"
    plot: Path = Path("kvpage-demo.png")
    cache_dtype: str = "auto"
    store: Path | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if torch.device(DeviceConfig(self.device).device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"--device must be usable, torch finds no CUDA device for {self.device!r}")
        check_picture(self.plot)


class Tokenizer(Protocol):
    """The part of a tokenizer that the demo uses. Tokenizers of transformers have it."""

    def encode(self, text: str) -> list[int]: ...


class ByteTokenizer:
    """Makes a token of each byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@dataclass(slots=True)
class Conversation:
    """Turns still to come, and all tokens so far: system prompt, questions and answers."""

    turns: list[list[int]]
    history: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Record:
    """Finished requests, and the blocks in use after each step."""

    outputs: list[RequestOutput] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    used_blocks: list[int] = field(default_factory=list)
    cached_blocks: list[int] = field(default_factory=list)


def run(options: DemoOptions, console: Console) -> bool:
    """Run the demo.

    Returns:
        False if a compared request differs from model.generate. With a cache that rounds, it may differ: then True.
    """
    config = cache_config(options)
    model, tokenizer = load_model(options)
    conversations = make_conversations(options, tokenizer)
    leave_out_unserved(model, console)
    is_fp8 = options.cache_dtype.startswith("fp8")
    engine = Engine.from_model(model, EngineConfig(config, kv_scales="calibrate" if is_fp8 else None))
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0.0)
    store = open_store(engine, model, options) if options.store else None
    record = serve(engine, conversations, params, console)
    if store:
        show_store(engine, store, options, console)
    began = time.perf_counter()
    compared = compare(model, record.outputs, options, console)
    num_equal, num_compared = sum(is_equal for _, is_equal in compared), len(compared)
    own_pace = sum(len(output.token_ids) for output, _ in compared) / (time.perf_counter() - began)
    if options.model is not None:  # answers of random weights are no text
        show_answers(record.outputs, tokenizer, console)
    show(engine, record, own_pace, console)
    draw(record, options)
    console.print(f"blocks over time: {options.plot}")
    verdict = f"{num_equal} of {num_compared} compared requests have the very tokens of model.generate"
    console.print(f"{verdict}; {len(record.outputs)} were served")
    if options.cache_dtype in ("auto", "fp32"):
        return num_equal == num_compared
    console.print(f"a cache of {options.cache_dtype} rounds keys and values: tokens may differ")
    return True


def leave_out_unserved(model: Any, console: Console) -> None:
    """Take settings out of the generation config that the engine does not serve, for `model.generate` as well."""
    for asked in unserved_fields(model.generation_config):
        console.print(f"generation_config asks for {asked}, which is not served: both sides go without", markup=False)
        setattr(model.generation_config, asked.partition("=")[0], None)


def open_store(engine: Engine, model: Any, options: DemoOptions) -> KVStore:
    """Open a store in the folder, under a name that no other weights have."""
    metadata = metadata_of(engine.cache, weights_digest(model))
    store = KVStore(
        KVStoreConfig(64, (f"disk://{quote(str((options.store or Path()).absolute()))}?size=1GiB",)), metadata
    )
    engine.use_store(store)
    return store


def show_store(engine: Engine, store: KVStore, options: DemoOptions, console: Console) -> None:
    """Close the engine and the store, and print the tokens loaded and the records kept."""
    stats = engine.stats()
    engine.close()
    assert stats.store is not None
    computed = stats.num_computed_tokens
    console.print(
        f"from {options.store}: {stats.store.num_loaded_tokens} tokens loaded in {stats.store.load_seconds:.2f} s that "
        f"would have been computed; {computed} were"
    )
    store.flush(sync=True)
    tier = store.stats().tiers[0]
    console.print(f"kept there: {'the folder does not answer' if tier is None else tier_in_words(tier)}")
    store.close()


def cache_config(options: DemoOptions) -> CacheConfig:
    """Return the cache's configuration."""
    return CacheConfig(
        block_size=options.block_size,
        num_gpu_blocks=options.num_blocks,
        layer_layout=options.layer_layout,
        cache_dtype=options.cache_dtype,
    )


# --- the model and the prompts ---------------------------------------------------------------------------------------


def load_model(options: DemoOptions) -> tuple[Any, Any]:
    """Return the model in fp32, in which equal tokens can be expected, and its tokenizer."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call, unused-ignore]  # not annotated there
    if options.model is None:
        return small_llama(options.seed).to(options.device), ByteTokenizer()
    if not options.model.is_dir():
        raise ValueError(f"--model must be a folder, got {options.model}")
    tokenizer = load_tokenizer_files(options.model, options.trust_remote_code)
    model = load_model_files(options.model, torch.float32, options.trust_remote_code)
    return model.to(options.device), tokenizer


def small_llama(seed: int, vocab_size: int = 256, max_model_len: int = 8192) -> Any:
    """Return a Llama, over bytes, whose random weights are large enough for its greedy tokens to vary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=max_model_len, initializer_range=0.08,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).train(False)


def make_conversations(options: DemoOptions, tokenizer: Tokenizer) -> list[Conversation]:
    """Return enough conversations for the requests. The last one may have fewer turns."""
    if options.prompts is not None:
        lines = [line for line in options.prompts.read_text().splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"--prompts must hold at least one line, {options.prompts} holds none")
        return [Conversation([tokenizer.encode(line)]) for line in lines[: options.num_requests]]
    text = project_text()
    systems = [text[i * SYSTEM_BYTES : (i + 1) * SYSTEM_BYTES] for i in range(NUM_SYSTEM_PROMPTS)]
    questions = excerpts(text[NUM_SYSTEM_PROMPTS * SYSTEM_BYTES :], TURN_BYTES)
    conversations: list[Conversation] = []
    for first in range(0, options.num_requests, options.num_turns):
        num_turns = min(options.num_turns, options.num_requests - first)
        turns = [tokenizer.encode(f"\nQ: {next(questions)}\nA: ") for _ in range(num_turns)]
        system = tokenizer.encode(systems[len(conversations) % NUM_SYSTEM_PROMPTS])
        conversations.append(Conversation(turns, system))
    return conversations


def project_text() -> str:
    """Return the README, from the installed metadata, and the docstrings of the package's modules."""
    readme = importlib.metadata.metadata("kvpage").json.get("description", "")
    modules = sorted(Path(__file__).parents[1].rglob("*.py"))
    documents = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in modules]
    return "\n".join([str(readme), *documents])


def excerpts(text: str, size: int) -> Iterator[str]:
    """Yield distinct excerpts of `text`, without end: each time around begins one character further on."""
    start = 0
    while True:
        for begin in range(start, len(text) - size, size):
            yield text[begin : begin + size]
        start += 1


# --- serving ---------------------------------------------------------------------------------------------------------


def serve(engine: Engine, conversations: list[Conversation], params: SamplingParams, console: Console) -> Record:
    """Serve all turns. A conversation's next turn begins as soon as the last one is answered."""
    record, started = Record(), time.perf_counter()
    by_request = {ask(engine, conversation, params): conversation for conversation in conversations}
    num_requests = sum(len(conversation.turns) + 1 for conversation in conversations)
    columns = TextColumn("serving"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("serving", total=num_requests)
        while engine.has_unfinished:
            for output in (step_output.output for step_output in engine.step()):
                if output is None:
                    continue
                record.outputs.append(output)
                progress.advance(task)
                conversation = by_request.pop(output.request_id)
                conversation.history += output.token_ids
                if conversation.turns:
                    by_request[ask(engine, conversation, params)] = conversation
            blocks = engine.manager.stats()
            record.seconds.append(time.perf_counter() - started)
            record.used_blocks.append(blocks.num_used_blocks)
            record.cached_blocks.append(blocks.num_evictable_blocks)
    return record


def ask(engine: Engine, conversation: Conversation, params: SamplingParams) -> str:
    """Send the conversation's next turn, and return the request's id."""
    conversation.history = conversation.history + conversation.turns.pop(0)
    return engine.add_request(conversation.history, params)


def compare(
    model: Any, outputs: list[RequestOutput], options: DemoOptions, console: Console
) -> list[tuple[RequestOutput, bool]]:
    """Compare an even sample of the requests with model.generate. Return each of them, and whether it is equal."""
    step = max(1, len(outputs) // max(1, options.num_checked))
    chosen = outputs[::step][: options.num_checked]
    columns = TextColumn("comparing with model.generate"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        equal = list(progress.track((equals_generate(model, output) for output in chosen), total=len(chosen)))
    compared = list(zip(chosen, equal, strict=True))
    for output in [output for output, is_equal in compared if not is_equal][:3]:
        console.print(difference(model, output), markup=False)
    return compared


def equals_generate(model: Any, output: RequestOutput) -> bool:
    """Return whether model.generate gives the same tokens."""
    expected: list[int] = by_generate(model, output).sequences[0, len(output.prompt_token_ids) :].tolist()
    return expected == list(output.token_ids)


def by_generate(model: Any, output: RequestOutput) -> Any:
    """Return model.generate's answer: greedy, with the penalties and the like of the model's generation config."""
    prompt = torch.tensor([list(output.prompt_token_ids)], device=model.device)
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=len(output.token_ids), do_sample=False,
        num_beams=1, num_return_sequences=1, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip


def difference(model: Any, output: RequestOutput) -> str:
    """Return where the tokens differ, and how near their scores are there. If nearer than rounding, both are right."""
    generated = by_generate(model, output)
    expected = generated.sequences[0, len(output.prompt_token_ids) :].tolist()
    pairs = enumerate(zip(output.token_ids, expected, strict=False))
    at, (token, other) = next((pair for pair in pairs if pair[1][0] != pair[1][1]), (-1, (0, 0)))
    if at < 0:
        return f"{output.request_id}: model.generate ends after {len(expected)} tokens, not {len(output.token_ids)}"
    gap = float(generated.scores[at][0, other] - generated.scores[at][0, token])
    return f"{output.request_id}: token {at} is {token}, {other} by model.generate, whose scores are {gap:.1e} apart"


# --- output ---------------------------------------------------------------------------------------------


def show(engine: Engine, record: Record, own_pace: float, console: Console) -> None:
    """Print the table of figures. own_pace: tokens a second of model.generate, for one request after the other."""
    stats, blocks = engine.stats(), engine.manager.stats()
    first_token = [1e3 * ((o.first_token_time or o.finish_time) - o.arrival_time) for o in record.outputs]
    num_generated = sum(len(output.token_ids) for output in record.outputs)
    rows = {
        "requests": f"{len(record.outputs)}",
        "generated tokens/s": f"{num_generated / record.seconds[-1]:.0f}",
        "tokens/s of model.generate": f"{own_pace:.0f}" if own_pace else "not compared",
        "time to first token, p50": f"{np.percentile(first_token, 50):.0f} ms",
        "time to first token, p99": f"{np.percentile(first_token, 99):.0f} ms",
        "prompt tokens from the cache": f"{100 * blocks.hit_rate:.1f} %",
        "blocks in use at most": f"{max(record.used_blocks)} of {blocks.num_blocks}",
        "blocks evicted": f"{blocks.evicted_blocks}",
        "preemptions": f"{stats.num_preemptions}",
    }
    table = Table("served", "", title="kvpage demo")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def draw(record: Record, options: DemoOptions) -> None:
    """Draw the blocks in use over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(
        record.seconds, record.used_blocks, record.cached_blocks, labels=["in use", "cached, can be evicted"],
        colors=["#2a6f97", "#a9d6e5"],
    )  # fmt: skip
    axes.axhline(options.num_blocks, color="black", linewidth=0.8, linestyle="--", label="all blocks")
    axes.set(xlabel="seconds", ylabel=f"blocks of {options.block_size} tokens", xlim=(0, record.seconds[-1]), ylim=0)
    axes.legend(loc="lower right")
    figure.savefig(options.plot, dpi=120)
