"""A cluster of Ray's own on one machine: a head, and worker nodes that can be added and removed."""

import os
from pathlib import Path

import transformers as tf
from support.models import make_model
from support.ports import free_port

STORE_BYTES = 80 << 20
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
}


def save_model(path: Path) -> Path:
    """Save a tiny decoder with random weights, and a tokenizer of single characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    make_model("llama", max_position_embeddings=2048).save_pretrained(path)
    vocab = {chr(32 + i): i for i in range(95)} | {f"<{i}>": i for i in range(95, 199)}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<95>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<95>", pad_token="<96>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}a:"
    tokenizer.save_pretrained(path)
    return path


class RayCluster:
    """A head that computes nothing, and `num_nodes` worker nodes of two CPUs each; Serve on a free port."""

    def __init__(self, num_nodes: int = 2) -> None:
        os.environ.update(QUIET)
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        common = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **common})
        common.pop("include_dashboard")
        self.nodes = [self.cluster.add_node(num_cpus=2, **common) for _ in range(num_nodes)]
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="warning")
        self.port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": self.port, "location": "HeadOnly"})

    def close(self) -> None:
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()
