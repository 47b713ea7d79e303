"""The benchmarks whose results are kept: a name, the command that gives them, and the sources that they measure."""

from typing import NamedTuple

SOURCES = ("kvpage", "kernels", "csrc", "setup.py", "CMakeLists.txt")
SERVED = {
    "hybrid_serving_mamba": ("mamba2", "falcon_h1", "granitemoehybrid", "mamba"),
    "hybrid_serving": ("qwen3_next", "lfm2", "jamba", "recurrent_gemma"),
}
"""The families of each run of bench_hybrid_serving."""
WITHOUT_PLOT = ("pool", "token_trie")


class Run(NamedTuple):
    """One benchmark. arguments: of `python`; the first is the script.

    sources: git paths on which a result depends, besides the script. It counts as today's until one of them has
    changed. Without any it is of its own commit for good.
    """

    name: str
    arguments: tuple[str, ...]
    sources: tuple[str, ...] = SOURCES

    def command(self, folder: str) -> list[str]:
        """Return the command line, which draws into `folder`."""
        plot = [] if self.name in WITHOUT_PLOT else ["--plot", f"{folder}/{self.name}.png"]
        return ["python", "-P", *self.arguments, *plot]


PEERLESS = "--without generate generate_batch"
MOVED = "--tokens 32768 --chunk-tokens 8192 --rounds 9"
HYBRID = "hybrid_serving --threads 2 --rounds 3 --without alone --families"
LINES = {
    "pool": "pool",
    "prefix": "prefix",
    "block_manager": "block_manager",
    "hybrid_prefix": "hybrid_prefix",
    **{name: f"{HYBRID} {' '.join(families)}" for name, families in SERVED.items()},
    "state_checkpoints": "state_checkpoints",
    "slots": "slots",
    "token_trie": "token_trie",
    "events": "events",
    "swap_host": "swap_host",
    "reshape_gather_one_thread": f"reshape_gather --threads 1 {MOVED}",
    "reshape_gather": f"reshape_gather --threads 2 {MOVED}",
    "store": "store --threads 1 --parts memory disk redis lookups",
    "store_two_threads": "store --threads 2 --parts memory disk",
    "store_tensors": "store --threads 1 --parts tensors",
    "store_tensors_two_threads": "store --threads 2 --parts tensors",
    "store_redis": "store_redis",
    "bytes": "bytes --threads 2",
    "engine_overhead": "engine_overhead",
    "step_parts_before": "step_parts --threads 2",
    "step_parts": "step_parts --threads 2",
    "sampling": "sampling --threads 2 --rows 256",
    "layer_overhead": "layer_overhead",
    "attention_steps": "attention_steps --dtypes float32 bfloat16 --threads 1 2",
    "shared_prefix": "shared_prefix --threads 2 --loop",
    "codec": "codec --rounds 5",
    "sealed": "sealed --rounds 5",
    "serving": "serving --threads 2 --requests 32 --rounds 3",
    "serving_bf16": f"serving --threads 2 --dtype bf16 --requests 8 --rounds 3 {PEERLESS}",
    "serving_large": f"serving --threads 2 --model large --requests 16 --rounds 3 {PEERLESS}",
    "serving_large_bf16": "serving --threads 2 --model large --dtype bf16 --requests 4 --rounds 3"
    " --without generate generate_prefix generate_copies generate_batch",
    "multi_turn": f"serving --threads 2 --workload multi-turn --rounds 3 {PEERLESS}",
    "serve": "serve --serve small --compare --threads 2 --num-requests 64 --input-len 32 --output-len 32 --rounds 6",
    "prefill_decode": "prefill_decode --rounds 5",
    "generate_cache": "generate_cache",
    "rollouts": "rollouts --threads 2 --rounds 5",
    "linear": "linear --threads 1 --rounds 5 --rows 1 8 32 256",
    "linear_two_threads": "linear --threads 2 --rounds 5 --rows 1 8 32 256",
    "blend_ops_one_thread": "blend_ops --threads 1",
    "blend_ops_two_threads": "blend_ops --threads 2",
    "blend_speed_2048": "blend --part speed --tokens 2048 --ratios 0.15 1.0 --rounds 3 --threads 1",
    "blend_speed_4096": "blend --part speed --tokens 4096 --ratios 0.15 --rounds 3 --threads 1",
    "blend_quality": "blend --part quality --threads 1",
    "serve_chats": "serve --serve small --threads 2 --dataset sharegpt --rate 1 --num-requests 30"
    " --goodput ttft:1000 tpot:100",
    "agent": "agent --model tiny --threads 2 --rounds 1",
    "serve_trace": "serve --serve small --threads 2 --dataset trace --scale 0.015625 --num-requests 120"
    " --goodput ttft:1000 tpot:100",
}
NEED_FILES = ("serve_trace",)
"""Runs that need a file of the caller's: `-- --trace FILE`."""
OTHER_SOURCES = {
    "hybrid_prefix": "kvpage/blocks csrc/tree csrc/states benchmarks/hybrid_bounds.py benchmarks/hybrid_runs.py"
    " benchmarks/hybrid_traces.py",
    # Measured once, while the model's own modules computed every product and norm: nothing makes it out of date.
    "step_parts_before": "",
    "blend_quality": "kvpage/blend kvpage/ops/blend.py kvpage/ops/reference benchmarks/blend_quality.py"
    " benchmarks/blend_methods.py benchmarks/blend_model.py benchmarks/blend_task.py",
}


def _run(name: str, line: str) -> Run:
    bench, *options = line.split()
    others = OTHER_SOURCES.get(name)
    return Run(name, (f"benchmarks/bench_{bench}.py", *options), SOURCES if others is None else tuple(others.split()))


RUNS = {name: _run(name, line) for name, line in LINES.items()}
