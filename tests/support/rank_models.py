"""Tiny models for several ranks, sharded as transformers does it; and processes that stand for torchrun's."""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import transformers as tf
import transformers.integrations.accelerate as device_maps
import transformers.modeling_utils as loading
from support.ports import free_port

VOCAB = 128
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def _latent_config(kind: Callable[..., tf.PretrainedConfig], **fields: object) -> tf.PretrainedConfig:
    """Return a config of MLA. transformers splits the heads of the second version, and not those of the third."""
    return kind(
        **{**COMMON, "num_key_value_heads": 8, "head_dim": 8}, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
        first_k_dense_replace=1, **fields,
    )  # fmt: skip


CONFIGS: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "llama": lambda: tf.LlamaConfig(**COMMON),
    "qwen3": lambda: tf.Qwen3Config(**COMMON),
    "mixtral": lambda: tf.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": lambda: _latent_config(tf.DeepseekV2Config, topk_method="greedy", n_group=1, topk_group=1),
    "deepseek_v3": lambda: _latent_config(tf.DeepseekV3Config, n_group=2, topk_group=1),
}  # fmt: skip


def save_model(kind: str, folder: Path) -> None:
    """Save a seeded model with random weights."""
    torch.manual_seed(0)
    tf.AutoModelForCausalLM.from_config(CONFIGS[kind]()).float().eval().save_pretrained(folder / kind)


def whole_model(folder: Path) -> tf.PreTrainedModel:
    """Load a saved model, all of it."""
    return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def sharded_model(folder: Path) -> tf.PreTrainedModel:
    """Load this rank's shard of a saved model.

    transformers asks whether accelerate is there, and uses nothing of it for one device.
    """
    with ExitStack() as patches:
        for part in (device_maps, loading):
            patches.enter_context(
                mock.patch.object(part, "is_accelerate_available", lambda *version: True, create=True)
            )
        name = "check_tied_parameters_on_same_device"  # of accelerate; transformers 4 calls it
        patches.enter_context(mock.patch.object(loading, name, lambda *arguments: None, create=True))
        return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **_sharding()).eval()


def _sharding() -> dict[str, object]:
    """Return the arguments by which from_pretrained shards a model: they differ between versions."""
    config = tf.distributed.DistributedConfig if hasattr(tf, "distributed") else None
    if config is not None and "tp_plan" in getattr(config, "__dataclass_fields__", {}):
        return {"distributed_config": config(tp_plan="auto")}
    return {"tp_plan": "auto"}


def run_ranks(size: int, work: Callable[[int], object]) -> list[int]:
    """Call work(rank) in `size` processes, with torchrun's variables; return the exit statuses, by rank.

    The processes are forks of this one, so that torch is imported once. This one must have no other threads.
    """
    port, children = free_port(), []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            _run_rank(rank, size, port, work)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _run_rank(rank: int, size: int, port: int, work: Callable[[int], object]) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    status = 1
    try:
        work(rank)
        status = 0
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
