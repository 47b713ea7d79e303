"""The small Llama that bench_blend trains and blends, and the reference of blending that it is measured with.

One forward pass holds a batch of documents, each with many questions behind it that do not see each other:

    document tokens  d d d d d d d d d     causal among themselves
    question 0                         A f    sees the document, and itself
    question 1                         A f    stands at the same positions as question 0

The loss is of the answers, and of whose each token of the document is, both at the model's output alone, and of where
one head of the last layer but one looks for the fact that is asked for: nothing says what a document's rows are to
hold, nor in which layer.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress, TextColumn
from safetensors.torch import load_model, save_model
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from kvpage.benchmarks import blend_task as task

ATTENTION = "kvpage_bench_blend"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvpage" / "bench_blend"


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """num_tokens: of the longest documents, which the last part of the training has; it begins with shorter ones."""

    seed: int = 0
    num_layers: int = 6
    hidden_size: int = 128
    num_heads: int = 4
    num_steps: int = 1000
    batch_tokens: int = 1024
    num_tokens: int = 160
    num_questions: int = 32
    learning_rate: float = 0.01


Rows = tuple[torch.Tensor, torch.Tensor]
"""K and V of a layer: [batch, heads, rows, size]."""
Swap = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], Rows]
"""Called with the layer, Q, K and V [batch, heads, rows, size]; returns K and V to use."""


class RowSwap:
    """The model's attention: K and V of some rows are taken from elsewhere.

    mask: bool [batch, rows, keys].
    """

    def __init__(self) -> None:
        self.mask: torch.Tensor | None = None
        self.swap: Swap | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        **options: object,
    ) -> tuple[torch.Tensor, None]:
        if self.swap is not None:
            key, value = self.swap(cast(int, module.layer_idx), query, key, value)
        mask = None if self.mask is None else self.mask[:, None]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return out.transpose(1, 2).contiguous(), None


def build(config: TrainingConfig) -> tuple[LlamaForCausalLM, RowSwap]:
    torch.manual_seed(config.seed)
    attention = RowSwap()
    name = f"{ATTENTION}_{id(attention):x}"  # one a model: transformers knows attention by its name alone
    AttentionInterface.register(name, attention)
    of_base_class: dict[str, Any] = {"attn_implementation": name}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=task.VOCAB_SIZE,
            hidden_size=config.hidden_size,
            intermediate_size=2 * config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_heads,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            **of_base_class,
        )
    )
    _keep_tokens_apart(model)
    return model, attention


def _keep_tokens_apart(model: LlamaForCausalLM) -> None:
    """Begins with a residual stream that is the token, and heads that attend to rows like the asking row (mimetic
    initialisation, Trockman and Kolter 2023): matching a token with the same one elsewhere is found late otherwise, or
    not at all in a few minutes."""
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=0.5)
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.normal_(std=0.06)
            layer.self_attn.q_proj.weight.copy_(layer.self_attn.k_proj.weight)
            layer.self_attn.o_proj.weight.mul_(0.2)
            layer.mlp.down_proj.weight.mul_(0.2)


def pack(tokens: torch.Tensor, questions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids and positions of documents with their questions after them, and the mask of attention."""
    count, num_tokens = tokens.shape
    num_questions, size = questions.shape[1:]
    ids = torch.cat([tokens, questions.flatten(1)], dim=1)
    own = num_tokens + torch.arange(size).repeat(num_questions)
    positions = torch.cat([torch.arange(num_tokens), own])
    group = torch.cat([torch.full((num_tokens,), -1), torch.arange(num_questions).repeat_interleave(size)])
    seen = (group[None] == -1) | (group[None] == group[:, None])
    mask = seen & torch.ones(len(group), len(group), dtype=torch.bool).tril()
    return ids, positions.expand(count, -1), mask.expand(count, -1, -1)


def some_facts(documents: task.Documents, count: int, draw: torch.Generator) -> torch.Tensor:
    """Return places of `count` facts in each document that belong to somebody (some twice if there are fewer)."""
    is_fact = (documents.tokens >= task.FIRST_FACT) & (documents.owners != task.NOBODY)
    return torch.multinomial(is_fact.float() + 1e-9, count, generator=draw)


class Losses(NamedTuple):
    """Means of cross entropies. asked: of the answers. told: of whose each token of the documents is. looked: of where
    one head looks for the fact that is asked for. right: the share of right answers."""

    asked: torch.Tensor
    told: torch.Tensor
    looked: torch.Tensor
    right: torch.Tensor


def losses_of(model: LlamaForCausalLM, attention: RowSwap, documents: task.Documents, where: torch.Tensor) -> Losses:
    num_tokens, looking = documents.tokens.shape[1], model.config.num_hidden_layers - 2
    questions, answers = task.ask(documents, where)
    ids, positions, attention.mask = pack(documents.tokens, questions)
    scores: list[torch.Tensor] = []

    def look(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Rows:
        if layer == looking:
            scores.append(query[:, 0, num_tokens + 1 :: 2] @ key[:, 0, :num_tokens].transpose(1, 2))
        return key, value

    attention.swap = look
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    attention.swap = None
    found = logits[:, num_tokens + 1 :: 2]
    asked = F.cross_entropy(found.flatten(0, 1), answers.flatten(), ignore_index=task.NOBODY)
    told = F.cross_entropy(logits[:, :num_tokens].flatten(0, 1), documents.owners.flatten(), ignore_index=task.NOBODY)
    looked = F.cross_entropy(scores[0].flatten(0, 1) * model.model.layers[0].self_attn.scaling, where.flatten())
    is_asked = answers != task.NOBODY
    return Losses(asked, told, looked, (found.argmax(-1) == answers)[is_asked].float().mean())


def optimizers(model: LlamaForCausalLM, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    rest = [p for name, p in model.named_parameters() if p.dim() != 2 or "layers" not in name]
    return [
        torch.optim.Muon(matrices, lr=config.learning_rate, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=config.learning_rate / 3, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def lengths(config: TrainingConfig, step: int) -> int:
    """Short documents first, from which matching is learned soonest."""
    share = step / config.num_steps
    return config.num_tokens // 8 if share < 0.4 else config.num_tokens // 2 if share < 0.7 else config.num_tokens


def train(config: TrainingConfig, report: Callable[[int, Losses], None]) -> LlamaForCausalLM:
    model, attention = build(config)
    steppers = optimizers(model, config)
    bases = [s.param_groups[0]["lr"] for s in steppers]
    draw = torch.Generator().manual_seed(config.seed)
    for step in range(config.num_steps):
        num_tokens = lengths(config, step)
        questions = min(config.num_questions, num_tokens // 2)
        count = max(config.batch_tokens // (num_tokens + 2 * questions), 1)
        documents = task.write_documents(count, num_tokens, seed=config.seed * 1_000_003 + step)
        losses = losses_of(model, attention, documents, some_facts(documents, questions, draw))
        warm = min(1.0, (step + 1) / 50) * min(1.0, 4 * (1 - step / config.num_steps))
        for stepper, base in zip(steppers, bases, strict=True):
            stepper.param_groups[0]["lr"] = base * warm
            stepper.zero_grad(set_to_none=True)
        (losses.asked + losses.told + losses.looked).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
        report(step, losses)
    return model


def load_or_train(config: TrainingConfig, cache: Path) -> tuple[LlamaForCausalLM, RowSwap]:
    """The model in evaluation, out of `cache` if it was trained there by the same configuration and the same files."""
    name = hashlib.sha256(
        repr(config).encode() + b"".join(Path(file).read_bytes() for file in (__file__, task.__file__))
    ).hexdigest()[:16]
    path = cache / f"{name}.safetensors"
    model, attention = build(config)
    if path.exists():
        load_model(model, path)
    else:
        model.load_state_dict(train_with_progress(config).state_dict())
        cache.mkdir(parents=True, exist_ok=True)
        save_model(model, str(path))
    return model.eval(), attention


def train_with_progress(config: TrainingConfig) -> LlamaForCausalLM:
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), TextColumn("answers right {task.fields[right]:.0%}"))
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(f"training, seed {config.seed}", total=config.num_steps, right=0.0)
        return train(config, lambda step, now: progress.update(bar, completed=step + 1, right=now.right.item()))
