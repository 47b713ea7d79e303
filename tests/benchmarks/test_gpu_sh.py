"""benchmarks/gpu.sh: its plan, what is left of parts that fail or hang, the archive, and the summary."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("tomllib")

from kvpage.benchmarks.gpu import part as part_module  # noqa: E402
from kvpage.benchmarks.gpu import plan as plan_module  # noqa: E402
from kvpage.benchmarks.gpu.__main__ import environment_of, run  # noqa: E402
from kvpage.benchmarks.gpu.dry_run import FAKED, OTHERS, SMALL, dry  # noqa: E402
from kvpage.benchmarks.gpu.part import NOT_THERE, TOO_LONG, Outcome, Part, last_json, run_part  # noqa: E402
from kvpage.benchmarks.gpu.plan import PROCESSES, ROOT, SECONDS, Folders, gpu_test_files, plan  # noqa: E402
from kvpage.benchmarks.gpu.results import Results  # noqa: E402
from kvpage.benchmarks.gpu.summary import TARGETS, summary_of, target_lines  # noqa: E402

SOURCE = Path(__file__).parents[2]  # gpu.sh runs there, while these tests import what is installed


@pytest.fixture(autouse=True)
def in_the_source(monkeypatch):
    monkeypatch.setattr(plan_module, "ROOT", SOURCE)


@pytest.fixture
def folders(tmp_path):
    return Folders(tmp_path, tmp_path / "wheels", tmp_path / "peers", tmp_path / "flashinfer")


@pytest.fixture
def results(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    return Results(tmp_path / "out", work)


def shell(name, script, **options):
    return Part(name, 60, ("sh", "-c", script), **options)


def contents(results):
    with tarfile.open(results.archive) as archive:
        return {name: archive.extractfile(name).read().decode() for name in archive.getnames()}


def lines_of(results):
    return [json.loads(line) for line in contents(results)["results.jsonl"].splitlines()]


# The plan


def test_benchmarks_have_their_whole_limits_in_ten_minutes(folders):
    parts = plan(folders)
    last = max(place for place, part in enumerate(parts) if part.name.startswith("bench_"))
    assert sum(part.seconds for part in parts[: last + 1]) <= SECONDS <= 600 - 60


def test_each_benchmark_stops_itself_before_its_limit(folders):
    measured = [part for part in plan(folders) if "--seconds" in part.command]
    assert len(measured) == 8
    for part in measured:
        own = float(part.command[part.command.index("--seconds") + 1])
        assert own <= part.seconds - 15, "for what begins before, and the plot"


def test_parts_in_their_order(folders):
    names = [part.name for part in plan(folders)]
    assert names[:4] == ["versions", "build", "smoke", "peers"]
    assert names.index("compile") < names.index("bench_paged_attention") < names.index("tests") < names.index("grid")
    assert names[-2:] == ["flashinfer_wheels", "flashinfer"]
    assert [part.name for part in plan(folders) if part.must_pass] == ["versions", "build", "smoke"]
    assert set(SMALL) | set(OTHERS) | set(FAKED) <= set(names)


def test_every_part_runs_in_this_python_and_names_its_script(folders):
    for part in [*plan(folders), *map(dry, plan(folders))]:
        assert part.command[0] == sys.executable
        assert all((SOURCE / argument).is_file() for argument in part.command if argument.endswith(".py"))


def test_flashinfer_is_installed_and_measured_last_alone(folders):
    parts = {part.name: part.command for part in plan(folders)}
    without = parts["bench_paged_attention"].index("--without")
    assert parts["bench_paged_attention"][without + 1] == "flashinfer"
    assert str(folders.flashinfer) not in parts["peers"] and "--without" in parts["peers"]
    assert str(folders.flashinfer) in parts["flashinfer_wheels"] and "--only" in parts["flashinfer_wheels"]
    assert "kvpage" in parts["bench_serving_gpu"][parts["bench_serving_gpu"].index("--attention") :]


def test_tests_of_a_gpu_are_named(folders):
    tests = next(part.command for part in plan(folders) if part.name == "tests")
    files = gpu_test_files()
    assert set(files) <= set(tests) and files[0].startswith("tests/gpu/")
    assert {"tests/kernels/test_attention_on_gpu.py", "tests/cache/test_swap_copy.py", "tests/ops/test_reshape.py"} <= {
        *files
    }
    marked = [path for path in (SOURCE / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    names = {path.relative_to(SOURCE).as_posix() for path in marked}
    left_out = {name for name in names - set(files) if not name.startswith(plan_module.LEFT_OUT)}
    assert not left_out and not any(name.startswith(plan_module.LEFT_OUT) for name in files)


def test_workers_are_asked_for_where_there_are_some(folders, monkeypatch):
    def asks():
        tests = next(part.command for part in plan(folders) if part.name == "tests")
        return "-n" in tests and str(PROCESSES) in tests

    monkeypatch.setattr(plan_module.importlib.util, "find_spec", lambda name: object())
    assert asks()
    monkeypatch.setattr(plan_module.importlib.util, "find_spec", lambda name: None)
    assert not asks()


def test_parts_import_what_is_installed(folders, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    made = environment_of(folders)
    assert made["PYTHONSAFEPATH"] == "1" and made["TRITON_CACHE_DIR"] == str(ROOT / ".tcache")
    assert made["PYTHONPATH"].split(os.pathsep) == [str(folders.peers), str(folders.flashinfer), "/somewhere"]
    monkeypatch.setenv("TRITON_CACHE_DIR", "/carried")
    assert environment_of(folders)["TRITON_CACHE_DIR"] == "/carried"


# A run


def test_each_part_leaves_its_output_and_a_line_of_json(results):
    parts = [shell("first", """echo begun; echo '{"figure": 3}'; echo done"""), shell("second", "echo no figure")]
    assert run(parts, results, 600, os.environ)
    assert set(contents(results)) == {"first.txt", "second.txt", "results.jsonl", "summary.txt"}
    first, second = lines_of(results)
    assert first["part"] == "first" and first["code"] == 0 and first["result"] == {"figure": 3}
    assert second["result"] is None and second["last_line"] == "no figure"
    assert contents(results)["first.txt"] == 'begun\n{"figure": 3}\ndone\n'


def test_the_archive_is_alone_and_whole_after_each_part(results):
    seen = f"ls {results.archive.parent}; tar -tzf {results.archive} | tr '\\n' ' '"
    assert run([shell("first", "echo 1"), shell("second", seen)], results, 600, os.environ)
    assert contents(results)["second.txt"] == "results.tar.gz\nfirst.txt results.jsonl summary.txt "
    assert [path.name for path in results.archive.parent.iterdir()] == ["results.tar.gz"]


def test_what_fails_is_said_and_the_rest_goes_on(results, capsys):
    assert not run([shell("first", "echo wrong; exit 3"), shell("second", "echo right")], results, 600, os.environ)
    assert "=== first failed with exit code 3: wrong" in capsys.readouterr().out
    assert [line["code"] for line in lines_of(results)] == [3, 0]
    assert "FAILED with exit code 3: wrong" in contents(results)["summary.txt"]


def test_the_run_ends_where_a_part_must_pass(results, capsys):
    parts = [shell("smoke", "echo no kernel compiles; exit 1", must_pass=True), shell("later", "echo never")]
    assert not run(parts, results, 600, os.environ)
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("=== the run ends here: without smoke") and "never" not in printed
    assert [line["part"] for line in lines_of(results)] == ["smoke"]


def test_after_all_time_is_spent_nothing_begins(results):
    assert not run([shell("first", "echo never"), shell("second", "echo never")], results, 0, os.environ)
    assert [line["code"] for line in lines_of(results)] == [None, None]
    assert contents(results)["first.txt"] == "no time left\n"


def test_a_program_that_is_not_there_is_a_failure(tmp_path):
    outcome = run_part(Part("none", 9, (str(tmp_path / "nothing"),)), 9, tmp_path / "log", os.environ)
    assert outcome.code == NOT_THERE and "nothing" in outcome.last_line


@pytest.fixture
def late_once_begun(monkeypatch, tmp_path):
    """The limit is over as soon as the part has said that it has begun, on any machine."""
    wait, log = subprocess.Popen.wait, tmp_path / "log"

    def waiting(process, timeout=None):
        if timeout != 9:
            return wait(process, timeout)
        while "begun" not in (log.read_text() if log.exists() else ""):
            pass
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", waiting)
    monkeypatch.setattr(part_module, "_show", _show_at_once)
    return log


def _show_at_once(source, file):
    for line in source:
        file.write(line)
        file.flush()


def test_a_part_that_hangs_is_interrupted_and_reports(late_once_begun):
    report = "trap 'echo interrupted; exit 1' INT; echo begun; while :; do sleep 1; done"
    outcome = run_part(shell("hangs", report), 9, late_once_begun, os.environ)
    assert outcome.code == TOO_LONG and outcome.last_line == "interrupted"


def test_a_failure_before_an_interrupt_is_reported(late_once_begun, tmp_path):
    """The whole run takes too long; what failed until then is told all the same."""
    tests = tmp_path / "test_slow.py"
    tests.write_text(
        "import time\ndef test_wrong():\n    assert 1 == 2\ndef test_long():\n    print('begun')\n    time.sleep(600)\n"
    )
    command = sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"
    outcome = run_part(Part("tests", 9, (*command, str(tests))), 9, late_once_begun, os.environ)
    assert outcome.code == TOO_LONG and "assert 1 == 2" in late_once_begun.read_text()


def test_what_a_part_leaves_running_is_killed(tmp_path):
    part = shell("leaves", "sleep 600 & echo $!")
    outcome = run_part(part, 60, tmp_path / "log", os.environ)
    with pytest.raises(ProcessLookupError):
        while True:  # a killed process is there until it is waited for, by whoever
            os.kill(int(outcome.last_line), 0)
            if Path(f"/proc/{outcome.last_line}/stat").read_text().split()[2] == "Z":
                raise ProcessLookupError
    assert outcome.code == 0


def test_the_last_json_counts():
    assert last_json(['{"a": 1}', "{broken", '{"b": 2}', "text", "{}x"]) == {"b": 2}
    assert last_json(["[1]", "nothing"]) is None and last_json([]) is None


@pytest.mark.parametrize("options", [{"seconds": 0.0}, {"command": ()}])
def test_parts_are_checked(options):
    with pytest.raises(ValueError):
        Part(**{"name": "x", "seconds": 1.0, "command": ("true",), **options})


# The summary

REACHED = {
    "bench_paged_attention": {
        "results": [
            {"kind": "decode", "model": "llama 3 8B", "dtype": "bfloat16", "seqs": 64, "keys": 8192, "queries": 1,
             "of bound": 0.84, "TFLOP/s": 1.0},
            {"kind": "decode", "model": "deepseek mla, 16 heads", "dtype": "bfloat16", "seqs": 64, "keys": 8192,
             "queries": 1, "of bound": 0.52, "TFLOP/s": 1.0},
            {"kind": "prefill", "model": "llama 3 8B", "dtype": "bfloat16", "seqs": 1, "keys": 8192, "queries": 8192,
             "of bound": 0.4, "TFLOP/s": 333.3},
        ]
    },
    "bench_swap": {
        "rows": [
            {"direction": "in", "piece_bytes": 32768, "num_pieces": 16384, "of_bound": 0.95},
            {"direction": "out", "piece_bytes": 32768, "num_pieces": 16384, "of_bound": 0.91},
            {"direction": "out", "piece_bytes": 32768, "num_pieces": 16, "of_bound": 0.1},
            {"direction": "copy", "piece_bytes": 32768, "num_pieces": 16384, "of_bound": 0.2},
        ]
    },
    "bench_serving_gpu": {
        "decode": [{"seqs": 64, "context": 1024, "step ms": {"median": 4.0}, "over bytes": {"median": 2.0}}]
    },
}  # fmt: skip


def test_a_row_a_target_has_the_prediction_the_figure_and_the_bound():
    lines = target_lines([Outcome(part, 1.0, 0, "", result) for part, result in REACHED.items()])
    rows = {line[:32].strip(): " ".join(line[32:].split()) for line in lines[1:]}
    assert rows["decode bf16, 64 x 8192"] == "0.80 to 0.88 0.84 at least 0.85 MISSED"
    assert rows["decode MLA, 16 heads"] == "0.45 to 0.55 0.52 at least 0.5 met"
    assert rows["prefill bf16, 8192"] == "300 to 380 TFLOP/s 333.30"
    assert rows["swap, pieces of 32 KiB"] == "0.75 to 0.90 0.91 at least 0.9 met"
    assert rows["step of Qwen3-0.6B, 64 x 1024"] == "3.2 to 4.0 ms 4.00"
    assert rows["the same, over its bytes"] == "1.6 to 2.0 2.00 at most 1.5 MISSED"
    assert rows["decode e4m3, 64 x 8192"] == "0.60 to 0.75 not measured at least 0.7"
    assert len(rows) == len(lines) - 1 == len(TARGETS)


def test_a_part_that_measured_nothing_leaves_its_rows_empty():
    outcomes = [
        Outcome("bench_swap", 1.0, 0, "", {"skipped": "needs a CUDA device"}),
        Outcome("tests", 0, None, "", None),
    ]
    assert summary_of(outcomes).count("not measured") == len(TARGETS)
    assert "no time left" in summary_of([]) + summary_of(outcomes)


def test_targets_name_cases_that_are_measured():
    """Each row of the summary finds its figure in a table as the benchmark makes it."""
    torch = pytest.importorskip("torch")
    from kvpage.benchmarks import bench_paged_attention, bench_reshape_gather, bench_swap

    cases = bench_paged_attention.cases(bench_paged_attention.SIZES["whole"])
    attention = [
        {"kind": kind, "model": model, "dtype": str(dtype).removeprefix("torch."), "seqs": seqs, "keys": keys,
         "queries": queries, "of bound": 1, "TFLOP/s": 1}
        for kind, model, dtype, seqs, keys, queries in cases
    ]  # fmt: skip
    rows = [
        {"operation": operation, "case": case.name, "tokens": tokens, "us": 1, "of copy": 1}
        for case in bench_reshape_gather.cases("cuda")
        for operation, tokens in (("reshape_and_cache", 64), ("reshape_and_cache", 4096), ("gather_cache", 65536),
                                  ("store_chunk device", max(bench_reshape_gather.CHUNK_TOKENS)))
    ]  # fmt: skip
    sizes = bench_swap.SIZES["whole"]
    swaps = [
        {"direction": "in", "piece_bytes": size, "num_pieces": sizes.most_bytes // size, "of_bound": 1}
        for size in sizes.piece_bytes
    ]
    made = {"bench_paged_attention": {"results": attention}, "bench_reshape_gather": {"results": rows}}
    made |= {"bench_swap": {"rows": swaps}, "bench_serving_gpu": REACHED["bench_serving_gpu"]}
    made["bench_shared_prefix"] = {"results": [{"seqs": 32, "shared": 4096, "times": 1}]}
    assert [target.name for target in TARGETS if target.find(made[target.part]) is None] == []
    assert bench_swap.TARGETS[("in", 32 << 10)] == 0.9 and torch.bfloat16 == bench_paged_attention.BF16


def test_the_page_has_each_target():
    page = (SOURCE / "docs/notes/machine_code.md").read_text()
    missing = [
        target.name for target in TARGETS if f"| {target.name} | {target.predicted} | {target.bound} | " not in page
    ]
    assert not missing


# The script


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_the_script_ends_with_a_line_where_the_build_cannot_be(tmp_path):
    """A machine without a device: versions come first, and their fault is the last word."""
    done = subprocess.run(
        ["bash", SOURCE / "benchmarks/gpu.sh", tmp_path / "out"],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,  # for a busy machine
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "torch must find a CUDA device" in done.stdout and "=== build" not in done.stdout
    with tarfile.open(tmp_path / "out/results.tar.gz") as archive:
        assert set(archive.getnames()) == {"versions.txt", "results.jsonl", "summary.txt"}
