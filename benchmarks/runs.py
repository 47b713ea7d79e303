"""The benchmarks whose results are kept: a name, the command that gives them, and the sources that they measure."""

from dataclasses import dataclass

SOURCES = ("kvpage", "kernels", "csrc", "setup.py", "CMakeLists.txt")
BLENDING = ("kvpage/blend", "kvpage/ops/blend.py", "kvpage/ops/reference", "benchmarks/blend_quality.py",
            "benchmarks/blend_methods.py", "benchmarks/blend_model.py", "benchmarks/blend_task.py")  # fmt: skip

HYBRID = ("kvpage/blocks", "csrc/tree", "csrc/states", "benchmarks/hybrid_bounds.py", "benchmarks/hybrid_runs.py",
          "benchmarks/hybrid_traces.py")  # fmt: skip

SERVED = {
    "hybrid_serving_mamba": ("mamba2", "falcon_h1", "granitemoehybrid", "mamba"),
    "hybrid_serving": ("qwen3_next", "lfm2", "jamba", "recurrent_gemma"),
}
"""The families of each run of bench_hybrid_serving."""


@dataclass(frozen=True, slots=True)
class Run:
    """One benchmark.

    arguments: of `python`; the first is the script.
    sources: what a result depends on, as git paths. It counts as today's until one of them has changed. Without any it
        is of its own commit for good, also when its script changes.
    has_plot: whether the script draws with --plot.
    """

    name: str
    arguments: tuple[str, ...]
    sources: tuple[str, ...] = SOURCES
    has_plot: bool = True

    @property
    def script(self) -> str:
        return self.arguments[0]

    @property
    def all_sources(self) -> tuple[str, ...]:
        return (*self.sources, self.script) if self.sources else ()

    def command(self, folder: str) -> list[str]:
        """The command line, which draws into `folder`."""
        plot = ["--plot", f"{folder}/{self.name}.png"] if self.has_plot else []
        return ["python", "-P", *self.arguments, *plot]


def _run(name: str, line: str, has_plot: bool = True, sources: tuple[str, ...] = SOURCES) -> Run:
    script, *options = line.split()
    return Run(name, (f"benchmarks/{script}.py", *options), sources, has_plot)


RUNS = {
    run.name: run
    for run in (
        _run("pool", "bench_pool", has_plot=False),
        _run("prefix", "bench_prefix"),
        _run("block_manager", "bench_block_manager"),
        _run("hybrid_prefix", "bench_hybrid_prefix", sources=HYBRID),
        *(
            _run(name, f"bench_hybrid_serving --threads 2 --rounds 3 --without alone --families {' '.join(families)}")
            for name, families in SERVED.items()
        ),
        _run("state_checkpoints", "bench_state_checkpoints"),
        _run("slots", "bench_slots"),
        _run("token_trie", "bench_token_trie", has_plot=False),
        _run("events", "bench_events"),
        _run("swap_host", "bench_swap_host"),
        _run(
            "reshape_gather_one_thread",
            "bench_reshape_gather --threads 1 --tokens 32768 --chunk-tokens 8192 --rounds 9",
        ),
        _run("reshape_gather", "bench_reshape_gather --threads 2 --tokens 32768 --chunk-tokens 8192 --rounds 9"),
        _run("store", "bench_store --threads 1 --parts memory disk redis lookups"),
        _run("store_two_threads", "bench_store --threads 2 --parts memory disk"),
        _run("store_tensors", "bench_store --threads 1 --parts tensors"),
        _run("store_tensors_two_threads", "bench_store --threads 2 --parts tensors"),
        _run("store_redis", "bench_store_redis"),
        _run("bytes", "bench_bytes --threads 2"),
        _run("engine_overhead", "bench_engine_overhead"),
        # Measured once, while the model's own modules computed every product and norm: nothing makes it out of date.
        _run("step_parts_before", "bench_step_parts --threads 2", sources=()),
        _run("step_parts", "bench_step_parts --threads 2"),
        _run("sampling", "bench_sampling --threads 2 --rows 256"),
        _run("layer_overhead", "bench_layer_overhead"),
        _run("attention_steps", "bench_attention_steps --dtypes float32 bfloat16 --threads 1 2"),
        _run("serving", "bench_serving --threads 2 --requests 32 --rounds 3"),
        _run(
            "serving_bf16",
            "bench_serving --threads 2 --dtype bf16 --requests 8 --rounds 3 --without generate generate_batch",
        ),
        _run(
            "serving_large",
            "bench_serving --threads 2 --model large --requests 16 --rounds 3 --without generate generate_batch",
        ),
        _run(
            "serving_large_bf16",
            "bench_serving --threads 2 --model large --dtype bf16 --requests 4 --rounds 3"
            " --without generate generate_prefix generate_copies generate_batch",
        ),
        _run(
            "multi_turn", "bench_serving --threads 2 --workload multi-turn --rounds 3 --without generate generate_batch"
        ),
        _run(
            "serve",
            "bench_serve --serve small --compare --threads 2 --num-requests 64 --input-len 32 --output-len 32"
            " --rounds 6",
        ),
        _run("prefill_decode", "bench_prefill_decode --rounds 5"),
        _run("generate_cache", "bench_generate_cache"),
        _run("rollouts", "bench_rollouts --threads 2 --rounds 5"),
        _run("linear", "bench_linear --threads 1 --rounds 5 --rows 1 8 32 256"),
        _run("linear_two_threads", "bench_linear --threads 2 --rounds 5 --rows 1 8 32 256"),
        _run("blend_ops_one_thread", "bench_blend_ops --threads 1"),
        _run("blend_ops_two_threads", "bench_blend_ops --threads 2"),
        _run("blend_speed_2048", "bench_blend --part speed --tokens 2048 --ratios 0.15 1.0 --rounds 3 --threads 1"),
        _run("blend_speed_4096", "bench_blend --part speed --tokens 4096 --ratios 0.15 --rounds 3 --threads 1"),
        _run("blend_quality", "bench_blend --part quality --threads 1", sources=BLENDING),
    )
}
