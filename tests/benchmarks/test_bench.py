"""`kvpage bench OP`: every one of them runs at its smallest size and ends in a line of JSON."""

import functools
import gc
import importlib
import json
import sys
import timeit
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from support.redis_server import MISSING  # noqa: E402
from typer.testing import CliRunner, Result  # noqa: E402

from kvpage.benchmarks import bench_blend_ops, blend_model, blend_quality, blend_speed  # noqa: E402
from kvpage.benchmarks.hybrid_traces import short  # noqa: E402
from kvpage.benchmarks.prefix_threads import measure_threads  # noqa: E402
from kvpage.benchmarks.serving_workloads import Shape  # noqa: E402
from kvpage.benchmarks.worker_process import WorkerPlan, make_worker  # noqa: E402
from kvpage.store.records.record_io import verify_record  # noqa: E402
from kvpage.store.tiers.memory_tier import MemoryTier  # noqa: E402
from kvpage.tools.cli import app  # noqa: E402

ONCE = ["--rounds", "1"]


def worker_here(plan: WorkerPlan) -> SimpleNamespace:
    """Return what WorkerProcess gives, but in this process."""
    worker = make_worker(plan)
    return SimpleNamespace(stream=worker.stream, wait=lambda: None, close=worker.engine.close)


SMALLEST: dict[str, tuple[list[str], dict[str, Any]]] = {  # options, and sizes that are constants of the script
    "agent": (["--model", "tiny", "--turns", "4", "--sub-turns", "1", "--system-words", "5", *ONCE], {}),
    "attention_steps": (["--shapes", "gpt2", "--dtypes", "bfloat16", "--threads", "1", *ONCE],
                        {"STEPS": {"decode shared": ((40,) * 3, (1,) * 3, 32), "chunks": ((20, 9), (4, 9), 0)}}),
    "blend": (["--layers", "3", "--hidden", "32", "--documents", "2", "--tokens", "64", "--ratios", "0.15", *ONCE],
              {"SEGMENT_TOKENS": {"quality": 8, "speed": 16}}),
    "block_manager": (["--seqs", "3", *ONCE],
                      {"PROMPT_TOKENS": 64, "CACHED_TOKENS": 32, "FEWEST_TOKENS": 20, "NUM_PROMPTS": 2}),
    "blend_ops": (["--layers", "3", "--tokens", "32", *ONCE], {}),
    "bytes": (["--tokens", "16", "--records", "2", "--layers", "2", "--threads", "1", *ONCE], {}),
    "codec": (["--elements", "4096", "--layers", "2", "--hidden", "16", "--documents", "2", *ONCE], {}),
    "engine_overhead": (["--batches", "2", "--vocabs", "64", "128", "--steps", "2", *ONCE], {"NUM_WAITING": 3}),
    "events": ([], {"NUM_BLOCKS": 32, "BATCHES": [1, 16], "REPEATS": 2}),
    "generate_cache": (["--prefix", "16", "--batch", "1", *ONCE], {"NEW": 2}),
    "hybrid_prefix": ([], {"TRACES": {"short": short}, "NUM_SEEDS": 1, "ROUNDS": 2}),
    "hybrid_serving": (["--families", "lfm2", "--hidden", "32", "--layers", "4", "--requests", "2",
                        "--prompt-tokens", "6", "--tokens", "3", "--threads", "1", *ONCE], {}),
    "launch": (["--number", "1", *ONCE], {}),
    "layer_overhead": (["--number", "1", *ONCE], {"BATCHES": (1,)}),
    "linear": (["--threads", "1", "--rows", "1", "2", *ONCE],
               {"SHAPES": ((8, 16),), "TURN": 1e-6, "FMA_ROUNDS": 100}),
    "paged_attention": (["--seconds", "0", *ONCE], {}),
    "pool": (["--rounds", "2"], {"NUM_BLOCKS": 2000, "BATCHES": [1, 10, 100, 1000]}),
    "prefix": ([], {"NUM_PROMPTS": 100, "RUNS": 2,
                    "measure_threads": functools.partial(measure_threads, rounds=1, seconds=0.001)}),
    "prefill_decode": (["--tokens", "33", *ONCE],
                       {"SHAPE": Shape(2, 32, 64, 2, 1), "START": worker_here, "NUM_BUSY": 1, "BEFORE": 2,
                        "MIN_PREFILL_TOKENS": 1}),
    "reshape_gather": (["--tokens", "32", "--chunk-tokens", "32", *ONCE], {}),
    "rollouts": (["--prompts", "2", "--group", "2", "--prompt-tokens", "17", "--tokens", "2", "--threads", "1", *ONCE],
                 {"VOCAB": 256, "MODELS": {"small": Shape(2, 32, 64, 2, 1)}}),
    "same_bits": (["--models", "gpt_oss", "--dtypes", "fp32", "--tasks", "decode one", "--prompt-tokens", "9",
                   "--seqs", "2", "--tokens", "2", *ONCE],
                  {"VOCAB": 256, "LAYERS": 1}),
    "same_bits_gpu": (["--rows", "1", "3", "--size", "32", "--vocab", "50", "--keys", "40", *ONCE], {}),
    "sampling": (["--rows", "2", "--vocabs", "64", "--threads", "1", *ONCE], {}),
    "sealed": (["--sizes", "300", "--records", "2", *ONCE], {}),
    "serve": (["--serve", "tiny", "--compare", "--num-requests", "3", "--input-len", "4", "--output-len", "3",
               "--threads", "1", *ONCE], {}),
    "serving": (["--workload", "separate", "shared", "multi-turn", "--requests", "2", "--prefix", "32", "--tokens", "2",
                 "--conversations", "2", "--turns", "2", "--turn-tokens", "8", "--threads", "1", *ONCE],
                {"VOCAB": 256, "MODELS": {"small": Shape(2, 32, 64, 2, 1)}}),
    "serving_gpu": (["--device", "cpu", "--shape", "tiny", "--batches", "1", "2", "--context", "17", "--requests", "2",
                     "--prompt-tokens", "20", "--tokens", "3", *ONCE], {"STEPS": 4}),
    "shared_prefix": (["--seqs", "2", "--shared", "33", "--own", "5", "--threads", "1", "--loop", *ONCE], {}),
    "slots": ([], {"NUM_PROMPTS": 10, "NUM_TOKENS": 512, "NUM_SHARED": 384}),
    "state_checkpoints": (["--families", "lfm2", "--hidden", "32", "--layers", "4", "--prompt-tokens", "20",
                           "--tokens", "3", "--threads", "1", *ONCE], {"GATE_TOKENS": 2}),
    "step_parts": (["--threads", "1", *ONCE],
                   {"VOCAB": 256, "MODELS": {"small": Shape(2, 32, 64, 2, 1)}, "NUM_SEQS": 2, "PREFIX_LEN": 32,
                    "PREFILL_LEN": 48}),
    "store": (["--chunks", "1", *ONCE],
              {"LAYERS": 1, "CHUNK_BYTES": 2 * 256 * 8 * 128 * 2, "SMALL_TIER": 1 << 20, "FULL_BYTES": 1 << 30}),
    "store_redis": (ONCE, {"SIZES": (1 << 16,), "TIMEOUTS": (0.005,)}),
    "swap": (ONCE, {}),
    "swap_host": (["--blocks", "8", *ONCE], {}),
    "token_trie": ([], {"NUM_TOKENS": 64, "TOKENS": range(64), "NUM_EVICTED": 20}),
}  # fmt: skip
NEEDS_GPU = ("paged_attention",)
NEEDS_REDIS = ("prefill_decode", "store_redis")
WITHOUT_PICTURE = ("paged_attention", "swap", "token_trie")


@pytest.fixture
def smallest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Sizes as the table says. Threads and random numbers are as they were afterwards."""
    num_threads, state = torch.get_num_threads(), torch.get_rng_state()
    repeat, tiny = timeit.repeat, Shape(3, 32, 64, 2, 2)
    monkeypatch.setattr(timeit, "repeat", lambda *args, **kwargs: repeat(*args, **{**kwargs, "number": 1, "repeat": 2}))
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr(blend_speed, "SMALL", tiny)
    monkeypatch.setattr(blend_quality, "BATCH", 2)
    monkeypatch.setattr(blend_quality, "NUM_RESAMPLES", 10)
    config = functools.partial(
        blend_model.TrainingConfig, num_heads=2, num_steps=2, batch_tokens=64, num_tokens=32, num_questions=4
    )
    monkeypatch.setattr(blend_model, "TrainingConfig", config)
    monkeypatch.setattr(blend_model, "CACHE", tmp_path / "models")
    monkeypatch.setattr(sys, "argv", sys.argv)
    yield monkeypatch
    torch.set_num_threads(num_threads)
    torch.set_rng_state(state)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def names() -> list[str]:
    folder = Path(bench_blend_ops.__file__).parent
    return sorted(path.stem.removeprefix("bench_") for path in folder.glob("bench_*.py"))


def test_the_table_has_all() -> None:
    assert sorted(SMALLEST) == names()
    listed = {line.split()[0] for line in bench().output.splitlines()}
    assert listed == set(SMALLEST)


def run(name: str, smallest: pytest.MonkeyPatch, *more: str) -> dict[str, Any]:
    """Return the line of JSON of a benchmark at its smallest size."""
    options, sizes = SMALLEST[name]
    script = importlib.import_module(f"kvpage.benchmarks.bench_{name}")
    for constant, value in sizes.items():
        smallest.setattr(script, constant, value)
    done = bench(name, *options, *more)
    assert done.exit_code == 0, (done.output, done.exception)
    said: dict[str, Any] = json.loads(done.output.splitlines()[-1])
    return said


@pytest.mark.parametrize("name", SMALLEST)
def test_it_runs_and_ends_in_json(name: str, smallest: pytest.MonkeyPatch) -> None:
    said = run(name, smallest)
    if "skipped" in said:
        is_missing = MISSING if name in NEEDS_REDIS else name in NEEDS_GPU and not torch.cuda.is_available()
        assert is_missing and "needs" in said["skipped"]
    else:
        assert any(isinstance(value, list | dict | float) and value for value in said.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SMALLEST if name not in WITHOUT_PICTURE])
def test_it_draws_a_picture(name: str, smallest: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of a GPU are drawn by the dry run: see test_dry_run."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    said = run(name, smallest, "--plot", str(picture))
    assert "skipped" in said or picture.stat().st_size > 1000


@pytest.mark.parametrize("name", ["blend", "blend_ops", "reshape_gather", "serving_gpu"])
def test_a_device_that_is_not_there_is_said(name: str, smallest: pytest.MonkeyPatch) -> None:
    smallest.setattr(torch.cuda, "is_available", lambda: False)
    done = bench(name, "--device", "cuda")
    assert done.exit_code == 0 and "needs a CUDA device" in json.loads(done.output.splitlines()[-1])["skipped"]


@pytest.mark.parametrize("num_layers", ["0", "1", "2"])
def test_too_few_layers_to_blend(num_layers: str, smallest: pytest.MonkeyPatch) -> None:
    done = bench("blend_ops", "--layers", num_layers)
    assert done.exit_code == 2 and "--layers must be at least 3" in done.output


def test_a_package_that_is_not_there_is_named(smallest: pytest.MonkeyPatch) -> None:
    smallest.delitem(sys.modules, "kvpage.benchmarks.bench_pool", raising=False)
    smallest.setitem(sys.modules, "numpy", None)
    done = bench("pool")
    assert done.exit_code == 1 and "kvpage bench pool needs the package numpy" in done.output


def test_records_that_redis_is_given_are_records() -> None:
    """Also where there is no server."""
    script = pytest.importorskip("kvpage.benchmarks.bench_store_redis", reason="needs redis", exc_type=ImportError)
    tier = MemoryTier(1 << 20)
    made = script.records(256, 2)
    script.put(tier, made)
    for key, (reader,) in ((key, tier.open([key])) for key in made):
        with reader:
            verify_record(reader, key)
    tier.close()
