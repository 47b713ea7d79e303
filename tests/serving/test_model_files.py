"""Folders of others: their code runs only where it is trusted, and damaged or incomplete ones are refused in a line."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import make_model
from support.server_app import make_tokenizer

from kvpage.serving.assembly.model_files import load_model_files, load_tokenizer_files

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    made = tmp_path_factory.mktemp("whole")
    tokenizer = make_tokenizer()
    make_model("llama", vocab_size=len(tokenizer)).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def change(path, **fields) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def refusal(work, *arguments) -> str:
    with pytest.raises(ValueError) as caught:
        work(*arguments)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


@pytest.fixture
def with_code(folder, tmp_path, monkeypatch):
    """A folder whose code leaves a mark, and somebody who answers "y" to every question."""
    code = f"open({str(tmp_path / 'mark')!r}, 'w')\nfrom transformers import LlamaConfig\n"
    (folder / "odd.py").write_text(
        code + "class C(LlamaConfig):\n    model_type = 'odd'\nclass T: pass\nclass M: pass\n"
    )
    change(folder / "config.json", model_type="odd", auto_map={"AutoConfig": "odd.C", "AutoModelForCausalLM": "odd.M"})
    change(folder / "tokenizer_config.json", tokenizer_class="T", auto_map={"AutoTokenizer": [None, "odd.T"]})
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return folder


@pytest.mark.parametrize("load", [load_tokenizer_files, lambda folder: load_model_files(folder, "auto")])
def test_code_of_a_folder_runs_only_where_it_is_trusted(with_code, tmp_path, load):
    message = refusal(load, with_code)
    assert "brings some: read it, and allow it by --trust-remote-code" in message
    assert not (tmp_path / "mark").exists()


def test_code_that_is_trusted_runs(with_code, tmp_path):
    with pytest.raises(ValueError):
        load_model_files(with_code, "auto", True)  # M is no model
    assert (tmp_path / "mark").exists()


def test_a_whole_folder_is_loaded(folder):
    model = load_model_files(folder, torch.float32)
    assert not model.training and torch.equal(model.lm_head.weight, load_file(folder / WEIGHTS)["lm_head.weight"])


def test_missing_and_other_weights_are_refused_by_name(folder):
    weights = load_file(folder / WEIGHTS)
    save_file({key: value for key, value in weights.items() if ".layers.1." not in key}, folder / WEIGHTS)
    message = refusal(load_model_files, folder, "auto")
    assert "must hold every weight of the model" in message and "model.layers.1.input_layernorm.weight" in message
    save_file(weights | {"lm_head.weight": torch.zeros(3, 3)}, folder / WEIGHTS)
    assert "must have its shapes" in (found := refusal(load_model_files, folder, "auto")) and "lm_head.weight" in found


def test_damaged_weights_are_one_sentence(folder):
    whole = (folder / WEIGHTS).read_bytes()
    for content in (b"", whole[:100], whole[: len(whole) // 2], b"\x80" * 100):
        (folder / WEIGHTS).write_bytes(content)
        assert refusal(load_model_files, folder, "auto").startswith("MODEL must be a language model of transformers: ")
    (folder / WEIGHTS).unlink()
    for content in (b"", b"\x80\x04no pickle"):
        (folder / "pytorch_model.bin").write_bytes(content)
        refusal(load_model_files, folder, "auto")


def test_damaged_configs_are_one_sentence(folder):
    for text in ("{", "[]", '{"model_type": "nothing"}', '{"model_type": "llama", "hidden_size": "x"}'):
        (folder / "config.json").write_text(text)
        refusal(load_model_files, folder, "auto")


def test_the_template_of_a_processor_is_read_where_there_is_no_other(folder):
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert load_tokenizer_files(folder).chat_template != "of the processor"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    change(folder / "tokenizer_config.json", chat_template=None)
    assert load_tokenizer_files(folder).chat_template == "of the processor"
    for text in ("{", "{}", '{"chat_template": 3}'):
        (folder / "chat_template.json").write_text(text)
        refusal(load_tokenizer_files, folder)
