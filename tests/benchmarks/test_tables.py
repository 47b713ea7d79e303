"""Rows of the pages' tables, from small results in the form that the benchmarks print."""

from pathlib import Path

import pytest

from kvpage.benchmarks import tables
from kvpage.benchmarks.cells import Row
from kvpage.benchmarks.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / tables.TEMPLATES).is_file():
    pytest.skip("needs the source tree", allow_module_level=True)
TEMPLATES = tables.read_templates(ROOT)
NUMBERS = TEMPLATES["docs/benchmarks.md", "numbers"]


def figure(median: float, spread: float = 1.0) -> Figure:
    return Figure(median, median - spread, median + spread, 3)


def cells(run: str, words: str, result: Row) -> list[str]:
    """Return the cells of the one row of a run that has these words, but for its words."""
    lines = [line for line in NUMBERS.lines if line.run == run]
    (found,) = (row for line in lines if words in line.cells[0] or "{" in line.cells[0] for row in line.rows(result))
    return found[1:]


def lines_of(page: str, name: str, results: dict[str, Row]) -> list[str]:
    """Return the lines of another table."""
    return TEMPLATES[page, name].table(results).splitlines()


PARTS = TEMPLATES["docs/benchmarks.md", "parts of a step"].titles[1:]


def decode(num_seqs: int, mode: str, waiting: int, vocab: int, us: float, peer: float | None = None) -> Row:
    row = {"operation": "decode", "seqs": num_seqs, "mode": mode, "waiting": waiting, "vocab": vocab}
    parts = dict.fromkeys(PARTS, figure(us / 4)) | {"sample": figure(us / 2)}
    row |= {"kvpage us": figure(us), "argmax us": figure(70), "parts us": parts, "target us": None}
    return row | ({"vllm us": figure(peer), "of vllm": figure(4.4)} if peer else {})


def admit(given: str) -> Row:
    return {"operation": "admit", "given": given, "kvpage us": figure(30), "vllm us": figure(1000), "parts us": {}}


STEPS = [
    decode(64, "greedy", 0, 1024, 200, 700),
    decode(256, "greedy", 0, 1024, 500, 2200),
    decode(256, "greedy", 0, 32000, 9000),
    decode(256, "greedy", 1000, 1024, 600, 2200),
    decode(256, "sampled", 0, 1024, 700),
    decode(256, "penalties", 0, 1024, 800),
]
ENGINE: Row = {"rows": [*STEPS, admit("array"), admit("list")]}
SPEEDS = {"kvpage": figure(300), "generate": figure(200), "vllm": figure(400), "bound": figure(900)}
SERVED: Row = {"workload": "shared", "tokens_per_s": SPEEDS, "kvpage_over": {"vllm": figure(0.75)}}
SERVING: Row = {"results": [SERVED]}


def test_a_step_is_beside_its_bound_and_peer() -> None:
    beside = "70 (69-71) us: argmax alone; 2,200 (2,199-2,201) us: vLLM's scheduler and KV manager alone"
    assert cells("engine_overhead", "a decode step of 256", ENGINE) == ["500 (499-501) us", beside]
    alone = "70 (69-71) us: argmax alone"
    assert cells("engine_overhead", "sampled: temperature", ENGINE) == ["700 (699-701) us", alone]
    assert cells("engine_overhead", "1,000 requests wait", ENGINE)[0] == "600 (599-601) us"
    assert cells("engine_overhead", "32,000 tokens", ENGINE) == ["9,000 (8,999-9,001) us", alone]


def test_an_admission_is_beside_the_peers() -> None:
    assert cells("engine_overhead", "an array", ENGINE) == ["30 (29-31) us", "1,000 (999-1,001) us: vLLM's"]


def test_products_are_spans_over_all_shapes() -> None:
    rows = [
        {"dtype": dtype, "rows": 1, **{name: figure(number) for name in ("kvpage GF/s", "of bound", "of torch")}}
        for dtype, number in (("float32", 2.0), ("float32", 1.0), ("bfloat16", 9.0))
    ]
    beside = "1.00 to 2.00 of the bound; 1.00 to 2.00 times as fast as `F.linear`"
    assert cells("linear", "one row", {"rows": rows}) == ["1 to 2 GF/s", beside]


def test_moves_are_spans_over_large_inputs_of_a_kind() -> None:
    def moved(operation: str, case: str, tokens: int, speed: float) -> Row:
        return {"operation": operation, "case": case, "tokens": tokens, "GB/s": figure(speed), "of copy": figure(0.5)}

    rows = [
        moved("gather_cache", "llama NHD bfloat16", 8192, 20.0),
        moved("reshape_and_cache", "llama HND bfloat16", 32768, 30.0),
        moved("reshape_and_cache", "llama NHD bfloat16", 64, 1.0),
        moved("reshape_and_cache", "llama NHD int8", 8192, 9.0),
        moved("load_chunk device", "llama NHD float8_e4m3", 8192, 12.0),
        moved("load_chunk hf", "llama NHD bfloat16", 8192, 2.0),
    ]
    run, result = "reshape_gather_one_thread", {"results": rows}
    assert cells(run, "write and gather", result) == ["20 to 30 GB/s", "0.50 to 0.50 of one `copy_`"]
    assert cells(run, "in fp8 and int8", result)[0] == "9 to 9 GB/s"
    assert cells(run, "chunks", result)[0] == "12 to 12 GB/s"


def test_a_layer_is_beside_its_native_calls() -> None:
    keys = {"model": "llama 3 8B", "dtype": "bfloat16", "seqs": 16}
    rows = [keys | {"besides us": figure(20), "native us": figure(8)}]
    measured = cells("layer_overhead", "a layer", {"rows": rows})
    assert measured == ["20.0 (19.0-21.0) us", "8.0 (7.0-9.0) us: the native calls"]


def test_a_step_of_attention_is_beside_its_bound() -> None:
    keys = {"step": "decode", "shape": "llama 3 8B", "dtype": "bfloat16", "threads": 2}
    result: Row = {"results": [{**keys, "us": figure(600), "of bound": figure(2)}]}
    measured = cells("attention_steps", "attention of a layer", result)
    assert measured == ["600 (599-601) us", "2.00 (1.00-3.00) of the products' or reading's rate"]


def test_a_managers_call_is_beside_its_bound() -> None:
    row = {"what": "step by rows", "us": figure(2), "bound": "numpy copy", "bound us": figure(1)}
    measured = cells("block_manager", "a decode step", {"rows": [row]})
    assert measured == ["2.00 (1.00-3.00) us", "1.00 (0.00-2.00) us: a copy of the arrays"]


def test_a_batch_of_blocks_counts_each() -> None:
    row = {"batch": 100, **{f"{kind}_ns": figure(400, 100) for kind in ("pool", "array", "list")}}
    measured, beside = cells("pool", "100 blocks", {"rows": [row]})
    assert measured == "4.0 (3.0-5.0) ns"
    assert beside == "4.0 (3.0-5.0) ns: slices of a numpy array; 4.0 (3.0-5.0) ns: a Python list"


def test_a_store_is_beside_its_bounds() -> None:
    row = {"operation": "disk store", "GB/s": figure(4), "bound": "pwrite", "bound GB/s": figure(6)}
    rows = [row, row | {"operation": "disk gathered", "bound": "pwritev", "bound GB/s": figure(5)}]
    measured = cells("store", "into the disk tier", {"results": rows})
    assert measured == ["4.0 (3.0-5.0) GB/s", "6.0 (5.0-7.0): pwrite; 5.0 (4.0-6.0): pwritev"]


def test_sampled_rows_are_beside_the_peers_that_were_measured() -> None:
    keys = {"num_rows": 256, "vocab_size": 1024, "rules": "greedy"}
    row = {**keys, "sample": figure(2), "torch": figure(8), "bound": figure(1)}
    measured, beside = cells("sampling", "1,024 logits, greedy", {"rows": [row]})
    assert measured == "2.00 (1.00-3.00) ms"
    others = ["8.00 (7.00-9.00) ms: by torch's operations", "1.00 (0.00-2.00) ms: reading the logits once"]
    assert beside.split("; ") == others
    _, with_peer = cells("sampling", "1,024 logits, greedy", {"rows": [row | {"vllm": figure(4)}]})
    assert with_peer.split("; ") == [others[0], "4.00 (3.00-5.00) ms: vLLM's sampler", others[1]]


def test_blending_is_counted_in_copies() -> None:
    row = {"operation": "in place", "ms": figure(20), "copies": figure(2)}
    measured = cells("blend_ops_one_thread", "in the memory", {"results": [row]})
    assert measured == ["20.0 (19.0-21.0) ms", "2.00 (1.00-3.00) of a `copy_` of all K and V"]


def served(**others: object) -> list[str]:
    """Return the cells of a workload with a shared prefix."""
    return cells("serving", "with a shared prefix", {"results": [SERVED | others]})


def test_vllm_comes_first_with_the_ratio_as_it_is() -> None:
    measured, beside = served()
    assert measured == "300 (299-301) tokens/s"
    first, *others = beside.split("; ")
    assert first == "400 (399-401): vLLM's CPU build, of which kvpage has 0.75 (-0.25-1.75)"
    assert others == ["200 (199-201): `model.generate`", "900 (899-901): the model's matrix products alone"]


def test_a_peers_error_is_shown_where_rounding_does_not_explain_it() -> None:
    for gap, said in ((0.94, ", and whose tokens lie up to 0.94 below the best logit"), (0.2, "")):
        first = served(max_gap={"vllm": gap})[1].split("; ")[0]
        assert first == f"400 (399-401): vLLM's CPU build, of which kvpage has 0.75 (-0.25-1.75){said}"


def test_without_vllm_its_cell_is_left_out() -> None:
    alone = {name: speed for name, speed in SPEEDS.items() if name != "vllm"}
    assert "vLLM" not in served(tokens_per_s=alone, kvpage_over={})[1]


def test_pages_are_beside_blocks_and_the_bound() -> None:
    row = {"operation": "disk load", "tokens": 16, "GB/s": figure(4), "of blocks": figure(1.5)}
    others = [row | {"tokens": 256}, row | {"operation": "disk store"}]
    result = {"results": [row | {"bound GB/s": figure(6), "bound": "preadv"}, *others]}
    measured, beside = cells("bytes", "16 tokens as pages of an engine, and back from disk", result)
    assert measured == "4.0 (3.0-5.0) GB/s"
    assert beside == "1.50 (0.50-2.50) of the same blocks through a `KVStore`; 6.0 (5.0-7.0): preadv"


def test_rollouts_are_beside_generate_and_the_bound() -> None:
    speeds = {"bound": figure(900), "kvpage": figure(600), "generate": figure(50)}
    result = {"tokens_per_s": speeds, "kvpage_over": {"generate": figure(12)}}
    measured, beside = cells("rollouts", "GRPO", result)
    assert measured == "600 (599-601) tokens/s"
    assert beside.split("; ") == [
        "50 (49-51): one `generate` over the padded batch, as TRL calls it",
        "900 (899-901): the model's matrix products alone",
        "kvpage has 12.0 (11.0-13.0) times that of `generate`",
    ]


def test_hits_of_hybrid_models_are_beside_borders_and_the_bound() -> None:
    row = {"trace": "shifted", "requests": 9, "borders_hits": 0, "tenth": 0.75, "bound": 0.8, "borders_all_tenth": 0.5}
    result = {"rows": [row | {"marked": True, "hits": 8}, row | {"marked": False, "hits": 7}]}
    assert cells("hybrid_prefix", "shifted by 100 tokens", result) == [
        "8 of 9",
        "0 of 9: states at block borders, as vLLM keeps them; 7 of 9: without the authors' marks",
    ]
    assert cells("hybrid_prefix", "shifted, a tenth", result) == [
        "75.0 %",
        "80.0 %: no policy finds more; 50.0 %: states at all block borders",
    ]


def test_serving_of_hybrid_models_is_beside_generate_and_says_what_packing_gains() -> None:
    medians = {"kvpage": 50, "generate": 20, "generate_padded": 60, "forward": 70}
    speeds, gains = {name: figure(median) for name, median in medians.items()}, {"pieces": figure(1.5, 0.1)}
    row = {"family": "lfm2", "states": "short convolution", "tokens_per_s": speeds, "kvpage_over": gains}
    result = {"families": [row | {"wrong": ["generate_padded"]}]}
    assert cells("hybrid_serving", "`lfm2`", result) == [
        "50 (49-51) tokens/s",
        "20 (19-21): `generate`, one by one; 60 (59-61), wrong tokens: `generate`, a padded batch; 70 (69-71): the"
        " model's own forward; kvpage has 1.50 (1.40-1.60) times that without packed mixers",
    ]
    name = "serving of models with states"
    assert lines_of("docs/hybrid.md", name, {"hybrid_serving": result})[2] == (
        "| `lfm2`: short convolution | 50 (49-51) | 20 (19-21) | 60 (59-61), wrong tokens | 70 (69-71)"
        " | 1.50 (1.40-1.60) |"
    )
    without = {"families": [row | {"wrong": [], "tokens_per_s": {"kvpage": figure(50)}}]}
    (line,) = lines_of("docs/hybrid.md", name, {"hybrid_serving": without})[2:]
    assert "| 50 (49-51) | not run | not run | not run |" in line


def test_the_cost_of_a_checkpoint_is_a_table() -> None:
    times = {
        "prefill": {"without": figure(1.5)},
        "prefill_added": figure(0.01, 0.02),
        "decode_added": figure(0, 0.01),
    }
    copies = {"restore_us": figure(5), "bound_us": figure(3)}
    row = {"states": "short convolution", "slot_bytes": 2**19, **times, **copies}
    result = {"prompt_tokens": 2048, "families": [row]}
    lines = lines_of("docs/hybrid.md", "cost of a checkpoint", {"state_checkpoints": result})
    assert lines[0].startswith("| state | prefill of 2,048 tokens | a checkpoint adds |")
    assert lines[2] == (
        "| short convolution, 0.50 MiB | 1,500 ms | 1.0 % (-1.0 to 3.0) | 0.0 % (-1.0 to 1.0) | 5 us, 3 us |"
    )


def test_parts_of_a_step_are_a_table() -> None:
    lines = lines_of("docs/benchmarks.md", "parts of a step", {"engine_overhead": ENGINE})
    assert lines[0] == f"| us of a step | {' | '.join(PARTS)} |" and lines[1] == "|---" * (len(PARTS) + 1) + "|"
    assert lines[2] == "| 64 sequences, greedy | 50 | 50 | 50 | 50 | 100 | 50 | 50 |" and len(lines) == 7


def test_parts_of_a_models_step_have_shares() -> None:
    name, page = "parts of a model's step", "docs/benchmarks.md"
    parts = TEMPLATES[page, name].titles[2:]
    row = {"step": "decode", "us": figure(800), "parts us": dict.fromkeys(parts, figure(200))}
    result = {"rows": [row]}
    _, _, *rows = lines_of(page, name, {"step_parts": result, "step_parts_before": result})
    cells = "| 800 us " + "| 200 us, 25 % " * len(parts) + "|"
    assert rows == [f"| decode, before {cells}", f"| decode {cells}"]
    assert lines_of(page, name, {"step_parts": result})[2:] == [f"| decode {cells}"]


def test_rows_without_a_result_are_left_out() -> None:
    only = NUMBERS.table({"engine_overhead": ENGINE})
    names = {line.cells[0] for line in NUMBERS.lines if line.run == "engine_overhead"}
    assert {line.split(" | ")[0].strip("| ") for line in only.splitlines()[2:]} == names
    assert all(template.table({}) == "Not measured yet." for template in TEMPLATES.values())


def test_a_command_is_shown_once() -> None:
    commands = [line.split(" | ")[-1].strip("| ") for line in NUMBERS.table({"engine_overhead": ENGINE}).splitlines()]
    assert commands[2] == "`python benchmarks/bench_engine_overhead.py`" and not any(commands[3:])
