"""nano-vllm over kvpage: its engine, sequences, model and loader; kvpage's blocks, memory and attention, on a CPU.

    python examples/nano_vllm.py FOLDER        FOLDER holds the package `nanovllm`, such as a clone of nano-vllm

No file of nano-vllm changes. Four of its names get other classes, before an engine is made:

    nanovllm.engine.llm_engine.Scheduler      PagedScheduler: BlockManager decides which blocks each sequence has
    nanovllm.engine.llm_engine.ModelRunner    PagedRunner: CacheEngine has the memory; no CUDA, no graphs, one rank
    nanovllm.models.qwen3.Attention           PagedAttention: kvpage.ops writes K and V, and attends
    nanovllm.models.qwen3.RMSNorm             PlainNorm: nano-vllm's own writes over its input where that is fp32

A module `flash_attn` that refuses to be called is put in where there is none, since nano-vllm imports it. Its functions
for torch.compile run as they are. A random Qwen3 of two layers then completes 24 prompts, and so does `model.generate`.
"""

import argparse
import importlib
import importlib.util
import inspect
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers as tf
from tokenizers import Tokenizer, models
from torch import nn

from kvpage import BlockManager, CacheConfig, CacheEngine, ModelConfig, OutOfBlocks, ops

BLOCK_SIZE, VOCAB, MAX_TOKENS = 16, 256, 24
GREEDY = 1e-6
"""nano-vllm takes no temperature of 0. At this one and below, the likeliest token is taken."""
PARTS = {
    "models.qwen3": ("Attention", "RMSNorm", "Qwen3ForCausalLM"),
    "engine.llm_engine": ("ModelRunner", "Scheduler"),
    "utils.context": ("set_context", "get_context", "reset_context"),
    "utils.loader": ("load_model",),
}
"""What is taken from which module of nano-vllm, or put in its place."""
STEP = ("is_prefill", "cu_seqlens_q", "slot_mapping", "context_lens", "block_tables")
"""What its `set_context` is told of a step."""


class PagedAttention(nn.Module):
    """In place of nanovllm.layers.attention.Attention. PagedRunner gives it a layer of the cache, and the layout."""

    layer: torch.Tensor
    layout: Any

    def __init__(self, num_heads: int, head_dim: int, scale: float, num_kv_heads: int) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write K and V of the new tokens, and attend to all of their sequences. query: [tokens, heads, head_dim]."""
        step = importlib.import_module("nanovllm.utils.context").get_context()
        ops.reshape_and_cache(key, value, self.layer, step.slot_mapping, self.layout)
        tables, lens = step.block_tables, step.context_lens.tolist()
        num_new = step.cu_seqlens_q.diff().tolist()
        return ops.paged_attention(query, self.layer, tables, lens, self.layout, scale=self.scale, query_lens=num_new)


class PlainNorm(nn.Module):
    """In place of nanovllm.layers.layernorm.RMSNorm, for rows of any dtype."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Return the norm of x; with a residual that of the sum, and the sum."""
        total = x if residual is None else x + residual
        normed = self.weight * nn.functional.rms_norm(total.float(), total.shape[-1:], eps=self.eps).to(x.dtype)
        return normed if residual is None else (normed, total)


class PagedRunner:
    """In place of nanovllm.engine.model_runner.ModelRunner, for one process."""

    def __init__(self, config: Any, rank: int, events: object) -> None:
        if config.tensor_parallel_size != 1:
            raise ValueError(f"tensor_parallel_size must be 1, got {config.tensor_parallel_size}")
        if not dist.is_initialized():  # its layers ask for their rank
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        qwen3 = importlib.import_module("nanovllm.models.qwen3")
        self.model = qwen3.Qwen3ForCausalLM(settings_of(config.hf_config))
        importlib.import_module("nanovllm.utils.loader").load_model(self.model, config.model)
        cache = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=config.num_kvcache_blocks)
        dtype = next(self.model.parameters()).dtype
        self.cache = CacheEngine(cache, ModelConfig.from_hf(config.hf_config, dtype))
        config.manager = self.manager = BlockManager(config.num_kvcache_blocks, BLOCK_SIZE)
        attentions = [module for module in self.model.modules() if isinstance(module, PagedAttention)]
        for attention, layer in zip(attentions, self.cache.gpu_cache, strict=True):
            attention.layer, attention.layout = layer, self.cache.layout

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method, as nano-vllm does on every rank."""
        return getattr(self, name)(*arguments)

    @torch.no_grad()
    def run(self, seqs: Sequence[Any], is_prefill: bool) -> list[int]:
        """Compute the tokens of each sequence from `first_new` on, and choose its next one."""
        context = importlib.import_module("nanovllm.utils.context")
        self.manager.do_moves(self.cache.do_move)
        new = [seq.token_ids[seq.first_new :] for seq in seqs]
        slots = [torch.from_numpy(self.manager.slot_mapping(seq.seq_id, seq.first_new, len(seq))) for seq in seqs]
        positions = [torch.arange(seq.first_new, len(seq)) for seq in seqs]
        context.set_context(
            is_prefill=True,  # each sequence's last token gets logits; a decode is a sequence with one new token
            cu_seqlens_q=torch.tensor([0, *map(len, new)]).cumsum(0),
            slot_mapping=torch.cat(slots),
            context_lens=torch.tensor([len(seq) for seq in seqs]),
            block_tables=torch.from_numpy(self.manager.block_tables([seq.seq_id for seq in seqs])),
        )
        hidden = self.model(torch.tensor(sum(new, [])), torch.cat(positions))
        logits = self.model.compute_logits(hidden)
        context.reset_context()
        return [choose(row, seq.temperature) for row, seq in zip(logits, seqs, strict=True)]

    def exit(self) -> None:
        """End the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


class PagedScheduler:
    """In place of nanovllm.engine.scheduler.Scheduler: prompts first, then decodes of all that run.

    seq.first_new: the first token of the step at hand; K and V of those before it are in blocks.
    """

    def __init__(self, config: Any) -> None:
        self.manager: BlockManager = config.manager
        self.max_num_seqs, self.max_num_tokens, self.eos = (
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.eos,
        )
        self.waiting: deque[Any] = deque()
        self.running: list[Any] = []
        self.num_prompt_tokens = self.num_found_tokens = 0

    def add(self, seq: Any) -> None:
        """Queue a sequence."""
        self.waiting.append(seq)

    def is_finished(self) -> bool:
        """Whether nothing waits or runs."""
        return not self.waiting and not self.running

    def schedule(self) -> tuple[list[Any], bool]:
        """Return the sequences of the next step, and whether they are prompts."""
        if admitted := self._admit():
            return admitted, True
        while self.running:
            try:
                self.manager.append([seq.seq_id for seq in self.running])  # all of them, or nothing has changed
                break
            except OutOfBlocks:
                self._preempt(self.running.pop())
        if not self.running:
            return self.schedule()
        for seq in self.running:
            seq.first_new, seq.num_scheduled_tokens = len(seq) - 1, 1
        return list(self.running), False

    def _admit(self) -> list[Any]:
        admitted: list[Any] = []
        num_tokens = 0
        while self.waiting and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if admitted and num_tokens + len(seq) > self.max_num_tokens:
                break
            try:
                found = self.manager.allocate(seq.seq_id, seq.token_ids).num_cached_tokens
            except OutOfBlocks:
                if not self.running:
                    raise
                break
            seq.first_new = seq.num_cached_tokens = found
            seq.num_scheduled_tokens = len(seq) - found
            seq.status = type(seq.status).RUNNING
            num_tokens += len(seq) - found
            self.num_prompt_tokens, self.num_found_tokens = (
                self.num_prompt_tokens + len(seq), self.num_found_tokens + found
            )  # fmt: skip
            self.running.append(self.waiting.popleft())
            admitted.append(seq)
        return admitted

    def _preempt(self, seq: Any) -> None:
        """Take a sequence's blocks. Those that are cached are found again, unless they are evicted."""
        self.manager.release(seq.seq_id)
        seq.status = type(seq.status).WAITING
        self.waiting.appendleft(seq)

    def postprocess(self, seqs: Sequence[Any], token_ids: Sequence[int], *more: object) -> None:
        """Commit what the step has written, and end sequences. more: what later versions of nano-vllm also pass."""
        for seq, token in zip(seqs, token_ids, strict=True):
            self.manager.commit(seq.seq_id, seq.token_ids[seq.first_new :])
            seq.append_token(token)
            if (not seq.ignore_eos and token == self.eos) or seq.num_completion_tokens == seq.max_tokens:
                seq.status = type(seq.status).FINISHED
                self.manager.release(seq.seq_id)
                self.running.remove(seq)


def choose(logits: torch.Tensor, temperature: float) -> int:
    """Return the likeliest token, or a drawn one."""
    if temperature <= GREEDY:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1))


def settings_of(config: Any) -> SimpleNamespace:
    """Return a Qwen3's config with the names that nano-vllm reads: transformers 5 has renamed those of the rotation."""
    settings = config.to_dict()
    rotation = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if rotation.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type must be 'default', which nano-vllm has, got {rotation['rope_type']!r}")
    theta = rotation.get("rope_theta", settings.get("rope_theta"))
    return SimpleNamespace(**{**settings, "rope_theta": theta, "rope_scaling": None})


def install(folder: str) -> ModuleType:
    """Import nano-vllm from a folder, with kvpage's classes in it.

    Returns:
        Its package.

    Raises:
        FileNotFoundError: the folder has no package `nanovllm`, or the package has not one of the files.
        ImportError: a file lacks a name that is taken from it, or its `set_context` takes something else.
    """
    check_files(Path(folder))
    torch.compiler.set_stance("force_eager")
    sys.path.insert(0, folder)
    lacks = importlib.util.find_spec("flash_attn") is None
    if lacks:
        sys.modules["flash_attn"] = refusing("flash_attn", "flash_attn_varlen_func", "flash_attn_with_kvcache")
    try:
        qwen3, engine, context, _ = map(part, PARTS)
    finally:
        if lacks:
            del sys.modules["flash_attn"]  # transformers would take it for the real one
    signature = inspect.signature(context.set_context)
    try:
        signature.bind(**dict.fromkeys(STEP))
    except TypeError as error:
        raise ImportError(f"{context.__file__}: set_context must take {', '.join(STEP)}, got {signature}") from error
    qwen3.Attention, qwen3.RMSNorm = PagedAttention, PlainNorm
    engine.ModelRunner, engine.Scheduler = PagedRunner, PagedScheduler
    return importlib.import_module("nanovllm")


def check_files(folder: Path) -> None:
    """Raise FileNotFoundError for the first file that is not there."""
    for name in ("__init__", *PARTS):
        path = folder / "nanovllm" / f"{name.replace('.', '/')}.py"
        if not path.is_file():
            raise FileNotFoundError(f"folder must hold the package nanovllm, got {folder} without {path}")


def part(name: str) -> Any:
    """Import a module of nano-vllm. Raises ImportError if it lacks a name that is taken from it."""
    module = importlib.import_module(f"nanovllm.{name}")
    for one in PARTS[name]:
        if one not in vars(module):
            raise ImportError(f"{module.__file__} must have {one}, got a version of nano-vllm without it")
    return module


def refusing(name: str, *functions: str) -> ModuleType:
    """Return a module whose functions raise."""

    def refuse(*arguments: object, **named: object) -> None:
        raise RuntimeError(f"{name} is not there: PagedAttention should have been called")

    module = ModuleType(name)
    vars(module).update(dict.fromkeys(functions, refuse))
    return module


def make_model(folder: str) -> Any:
    """Write a random Qwen3 of two layers, and a tokenizer whose words are numbers."""
    torch.manual_seed(0)
    config = tf.Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.2, eos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = tf.Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(token): token for token in range(VOCAB)}, unk_token="0"))
    tf.PreTrainedTokenizerFast(tokenizer_object=words, eos_token=str(VOCAB - 1)).save_pretrained(folder)
    return model


def make_prompts() -> list[list[int]]:
    """Return 24 prompts: four beginnings of 200 to 350 tokens, each with six tails."""
    generator = torch.Generator().manual_seed(0)

    def tokens(num: int) -> list[int]:
        return torch.randint(1, VOCAB - 1, (num,), generator=generator).tolist()

    beginnings = [tokens(200 + 50 * number) for number in range(4)]
    return [begin + tokens(1 + 7 * tail) for tail in range(6) for begin in beginnings]


def main(folder: str, num_blocks: int = 200) -> None:
    """Complete the prompts, and compare. Few blocks make it preempt and evict."""
    nano = install(folder)
    with tempfile.TemporaryDirectory() as model_folder:
        model = make_model(model_folder)
        llm = nano.LLM(
            model_folder, max_model_len=1024, max_num_batched_tokens=1024, max_num_seqs=8, num_kvcache_blocks=num_blocks
        )
    prompts = make_prompts()
    params = nano.SamplingParams(temperature=GREEDY, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    num_same = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False)
        num_same += output["token_ids"] == expected[0, len(prompt) :].tolist()
    print(f"{num_same} of {len(prompts)} prompts as model.generate")
    print(f"{llm.scheduler.num_found_tokens} of {llm.scheduler.num_prompt_tokens} prompt tokens found")
    if num_same != len(prompts):
        raise SystemExit("tokens differ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="holds the package nanovllm")
    parser.add_argument("--blocks", type=int, default=200, help="of 16 tokens")
    given = parser.parse_args()
    main(given.folder, given.blocks)
