"""The command line, as a user calls it, right and wrong."""

import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("typer")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import kvpage  # noqa: E402
from kvpage.cache.calibration import Throughput  # noqa: E402
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata  # noqa: E402
from kvpage.tools import demo  # noqa: E402
from kvpage.tools.cli import app  # noqa: E402

SMALL = ["--requests", "6", "--turns", "2", "--max-tokens", "5", "--sample", "6", "--blocks", "256"]


def run(*arguments: str):
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": "120"})


def test_the_package_runs_as_the_command_line():
    done = subprocess.run([sys.executable, "-m", "kvpage", "--version"], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"kvpage {kvpage.__version__}\n"
    wrong = subprocess.run([sys.executable, "-m", "kvpage", "infos"], text=True, capture_output=True)
    assert wrong.returncode == 2 and "No such command 'infos'" in wrong.stderr


def test_info_prints_all_of_build_info():
    result = run("info")
    assert result.exit_code == 0
    for name in kvpage.build_info():
        assert re.search(rf"\b{name}\b", result.output), name


def test_info_calibrate_prints_what_was_measured(monkeypatch):
    rows = (Throughput(2048, 5.5, 30.25), Throughput(1 << 21, 55.0, 41.0))
    found = kvpage.Calibration("a device", 16, rows, rows[:1] + (Throughput(1 << 21, 53.0, 54.0),), 2048, 1 << 21, 0.25)
    monkeypatch.setattr("kvpage.cache.calibration.calibrate", lambda: found)
    result = run("info", "--calibrate")
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert "swaps on a device, GB/s; the kernel on 16 thread groups; 0.25 s" in text
    assert "│ 2 KiB │ 5.5 │ 30.2 │ 5.5 │ 30.2 │" in text and "│ 2048 KiB │ 55.0 │ 41.0 │ 53.0 │ 54.0 │" in text
    assert "extents of up to 2048 bytes in, 2097152 bytes out" in text


def test_info_calibrate_without_cuda_says_why(monkeypatch):
    monkeypatch.setattr("kvpage._C.cuda_error", lambda: "no reason")
    result = run("info", "--calibrate")
    assert result.exit_code == 0 and "no calibration: calibrate needs CUDA: no reason" in result.output


@pytest.mark.parametrize("layer_layout", ["separate", "packed"])
def test_demo_serves_and_compares(tmp_path, layer_layout):
    plot = tmp_path / "blocks.png"
    result = run("demo", *SMALL, "--layer-layout", layer_layout, "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert "6 of 6 compared requests have the very tokens of model.generate; 6 were served" in result.output
    assert re.search(r"prompt tokens from the cache │ [1-9]", result.output)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "int8"])
def test_demo_of_a_cache_that_rounds(tmp_path, cache_dtype):
    """It says so, and tokens that differ are no failure."""
    small = [*SMALL, "--requests", "2", "--max-tokens", "3"]
    result = run("demo", *small, "--cache-dtype", cache_dtype, "--plot", str(tmp_path / "b.png"))
    assert result.exit_code == 0, result.output
    assert f"a cache of {cache_dtype} rounds keys and values: tokens may differ" in result.output
    assert re.search("[0-2] of 2 compared", result.output)


def test_demo_with_a_model_and_prompts_of_ones_own(tmp_path):
    folder, prompts = save_model(tmp_path / "model"), tmp_path / "prompts.txt"
    prompts.write_text("the cat sat\n\nthe cat sat on the mat\nmat\n")
    result = run("demo", "--model", str(folder), "--prompts", str(prompts), *SMALL, "--plot", str(tmp_path / "b.png"))
    assert result.exit_code == 0, result.output
    assert "3 of 3 compared" in result.output
    shown = " ".join(result.output.replace("│", " ").split())
    assert "the first answers" in shown and "the cat sat on the mat" in shown
    assert re.search(r"\d+ of \d+ tokens", shown)


def test_the_version_is_printed():
    result = run("--version")
    assert result.exit_code == 0 and result.output == f"kvpage {kvpage.__version__}\n"


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"repetition_penalty": 1.4, "do_sample": True, "temperature": 0.6, "num_beams": 2}, ""),
        ({"repetition_penalty": 1.4, "guidance_scale": 1.5}, "asks for guidance_scale=1.5, which is not served"),
    ],
)
def test_demo_does_what_the_generation_config_asks_for(tmp_path, fields, text):
    folder = save_model(tmp_path / "model")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **fields}))
    (tmp_path / "prompts.txt").write_text("the cat sat\nthe cat sat on the mat\n")
    prompts = ["--prompts", str(tmp_path / "prompts.txt")]
    result = run("demo", "--model", str(folder), *prompts, *SMALL, "--plot", str(tmp_path / "b.png"))
    assert result.exit_code == 0, result.output
    assert "2 of 2 compared" in result.output and text in " ".join(result.output.split())


def test_demo_says_where_tokens_part(tmp_path, monkeypatch):
    """A model that is changed between the two sides: the scores tell that this is no rounding."""
    compare = demo.compare

    def change(model, *others):
        model.lm_head.weight.data *= -1
        return compare(model, *others)

    monkeypatch.setattr(demo, "compare", change)
    result = run("demo", *SMALL, "--plot", str(tmp_path / "b.png"))
    text = " ".join(result.output.split())
    assert result.exit_code == 1 and re.search(r"token 0 is \d+, \d+ by model.generate, whose scores are", text)


def test_demo_says_so_when_tokens_differ(tmp_path, monkeypatch):
    monkeypatch.setattr("kvpage.tools.demo.equals_generate", lambda model, output: False)
    result = run("demo", *SMALL, "--plot", str(tmp_path / "b.png"))
    assert result.exit_code == 1 and "0 of 6 compared" in result.output


WRONG = {
    "no folder of the model": (["--model", "/does/not/exist"], "--model must be a folder"),
    "no file of prompts": (["--prompts", "/does/not/exist"], "No such file"),
    "no folder for the plot": (["--plot", "/does/not/exist/b.png"], "--plot must be in an existing folder"),
    "unknown device": (["--device", "abacus"], "device must be"),
    "unknown dtype": (["--cache-dtype", "fp9"], "cache_dtype must be auto or one of"),
    "unknown layout": (["--layer-layout", "loose"], "layer_layout must be one of"),
    "too few blocks": (["--blocks", "2"], "must fit into 2 blocks"),
}


@pytest.mark.parametrize("case", WRONG)
def test_demo_refuses_wrong_input_in_one_sentence(tmp_path, case):
    arguments, text = WRONG[case]
    plot = [] if "--plot" in arguments else ["--plot", str(tmp_path / "b.png")]
    result = run("demo", *arguments, *plot)
    assert result.exit_code not in (0, None)
    assert text in str(result.exit_code) + str(result.exception) + result.output
    assert isinstance(result.exception, SystemExit), result.exception


def test_an_empty_file_of_prompts(tmp_path):
    (tmp_path / "prompts.txt").write_text("\n  \n")
    result = run("demo", "--prompts", str(tmp_path / "prompts.txt"), "--plot", str(tmp_path / "b.png"))
    assert "must hold at least one line" in str(result.exception)


def save_model(folder):
    """A tiny Llama and a tokenizer of whole words, as `--model` takes them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "the", "cat", "sat", "on", "mat"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=None, initializer_range=0.5,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_bench_lists_what_there_is_and_refuses_what_there_is_not():
    listed = CliRunner().invoke(app, ["bench"])
    assert listed.exit_code == 0
    for name in ("pool", "prefix", "swap", "reshape_gather", "paged_attention", "serving"):
        assert name in listed.output
    refused = CliRunner().invoke(app, ["bench", "everything"])
    assert refused.exit_code == 1 and "OP must be one of" in str(refused.exception or refused.output)


def test_bench_hands_options_on(tmp_path):
    command = [sys.executable, "-c", "from kvpage.tools.cli import main; main()", "bench", "swap_host"]
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert helped.returncode == 0 and "--blocks" in helped.stdout
    done = subprocess.run([*command, "--blocks", "8", "--rounds", "1"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["blocks"] == 8 and set(said["results"]) == {"separate", "packed"}


def test_explain_tells_what_a_tier_has_of_a_prompt(tmp_path):
    url, tokens = f"disk:{tmp_path}/kv", list(range(9))
    with KVStore(KVStoreConfig(4, (f"{url}?size=1MiB",)), KVStoreMetadata("m", kv_dtype=torch.float32)) as store:
        store.store(tokens[:8], torch.ones(1, 2, 8, 1, 2))
        (tmp_path / "prompt").write_text(json.dumps(tokens))
        result = run("explain", "--store", url, "--tokens", str(tmp_path / "prompt"))
    assert result.exit_code == 0 and "8 of 9 tokens" in result.output and "nothing more is cached" in result.output
    (tmp_path / "prompt").write_text("0 1, 2 3\n")
    arguments = ["--store", url, "--tokens", str(tmp_path / "prompt"), "--json", "--namespace", ""]
    (reach,) = json.loads(run("explain", *arguments).stdout.splitlines()[-1])["reaches"]
    assert (reach["num_tokens"], reach["ending"]) == (4, "the prompt ends")
    arguments[-1] = "other"
    assert json.loads(run("explain", *arguments).stdout)["reaches"] == []
    (tmp_path / "prompt").write_text("one two")
    for wrong in (["--store", url, "--tokens", str(tmp_path / "prompt")], ["--store", "none://", "--tokens", "-"]):
        result = CliRunner().invoke(app, ["explain", *wrong], input="1 2")
        assert result.exit_code == 1 and "kvpage explain" in str(result.exception)
