"""docs/families.md says what is served: by every type of this transformers, and by some that are tried again here.

All are tried by `python tests/support/families.py --check docs/families.md`.
"""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import transformers as tf
from support.families import differences, main
from support.family import CHUNK, EQUAL, LOADS, MIN_DISTINCT, Family, judge
from support.family_configs import decoder_types
from support.family_table import FamilyTable, row_of
from support.family_worker import FamilyWorker

DOCUMENT = Path(__file__).parents[3] / "docs" / "families.md"
SAMPLE = (
    "bert", "deepseek_v3", "falcon", "gemma3_text", "gpt2", "llama", "llama4_text", "mamba", "mimo_v2_flash", "moshi",
    "mpt", "openai-gpt", "phimoe",
)  # fmt: skip


@functools.cache
def written() -> FamilyTable:
    """The document, if it is of this transformers."""
    table = FamilyTable.parse(DOCUMENT.read_text())
    if table.version != tf.__version__:
        pytest.skip(f"docs/families.md is of transformers {table.version}, this is {tf.__version__}")
    return table


def test_every_type_is_listed() -> None:
    assert written().rows.keys() == decoder_types().keys()


def test_the_document_is_as_it_was_written() -> None:
    text = DOCUMENT.read_text()
    assert FamilyTable.parse(text).text(CHUNK) == text
    assert "WRONG" not in text and LOADS not in {word for row in FamilyTable.parse(text).rows.values() for word in row}


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_type(kind: str) -> None:
    row = written().rows[kind]
    family = judge(kind)
    assert row_of(family) == row
    assert family.num_distinct >= MIN_DISTINCT or EQUAL not in row


def test_differences(tmp_path: Path) -> None:
    found = Family("llama", "LlamaForCausalLM", EQUAL, EQUAL)
    refused = dataclasses.replace(found, kind="mamba", engine="layers must be of x, M has conv", cache="no")
    path = tmp_path / "families.md"
    path.write_text(FamilyTable.of_families("5.0", [found, refused]).text(CHUNK))
    assert "2 types.\n`Engine` serves 1." in path.read_text()
    assert differences(FamilyTable.of_families("5.0", [found]), path) == []
    wrong = dataclasses.replace(found, cache="WRONG: [] for [1]")
    for families, count in (([wrong, refused], 1), ([found, dataclasses.replace(found, kind="new")], 1)):
        assert len(differences(FamilyTable.of_families("5.0", families), path)) == count


def test_the_script_goes_on_from_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tried again; 1 for a wrong token, or where the document says otherwise."""
    results, path = tmp_path / "results.jsonl", tmp_path / "families.md"
    arguments = ["families", "--results", str(results), "--check", str(path), "--only", "llama", "--only", "gpt2"]
    monkeypatch.setattr("sys.argv", arguments)
    found = [Family(kind, "M", EQUAL, EQUAL) for kind in ("llama", "gpt2")]
    path.write_text(FamilyTable.of_families(tf.__version__, found).text(CHUNK))
    for last, code in ((found[1], 0), (dataclasses.replace(found[1], engine="WRONG"), 1)):
        results.write_text("".join(json.dumps(dataclasses.asdict(family)) + "\n" for family in (found[0], last)))
        assert main() == code
    monkeypatch.setattr("sys.argv", [*arguments, "--write", str(path)])
    with pytest.raises(SystemExit):
        main()


def test_a_type_that_takes_too_long_is_stopped() -> None:
    worker = FamilyWorker(seconds=0.01)
    try:
        for _ in range(2):
            assert worker.judge("llama").trouble == "not tried: it took more than 0.01 s"
    finally:
        worker.close()
