"""kvpage store: what it tells of a directory, by the functions and by the command line."""

import json

import pytest
import torch
from typer.testing import CliRunner

from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata, inspection
from kvpage.tools.cli import app

TOKENS = list(range(20))


def fill(path) -> str:
    """Three chunks of one model in a namespace, two of another; returns the URL."""
    url = f"disk://{path}?size=8MiB&segment=4MiB"
    for model, namespace, tokens in (("first", b"tenant", TOKENS), ("[second]", b"", TOKENS[:13])):
        metadata = KVStoreMetadata(model, kv_dtype=torch.float32, fmt="huggingface")
        with KVStore(KVStoreConfig(8, (url,)), metadata) as store:
            store.store(tokens, torch.randn(2, 2, 3, len(tokens), 4), namespace=namespace)
    return url


def corrupt(path) -> None:
    (file,) = path.glob("*.segment")
    data = bytearray(file.read_bytes())
    at = data.index(b"kvpagerc") + 300
    data[at] ^= 1
    file.write_bytes(bytes(data))


def command(*arguments: str):
    return CliRunner().invoke(app, ["store", *arguments], env={"COLUMNS": "200"})


def test_summaries(tmp_path) -> None:
    tier = inspection.open_tier(fill(tmp_path))
    records = sorted(inspection.summaries(tier), key=lambda one: (one.model, -one.num_tokens))
    assert [(one.model, one.namespace, one.num_tokens) for one in records] == [
        ("[second]", b"", 8), ("[second]", b"", 5),
        ("first", b"tenant", 8), ("first", b"tenant", 8), ("first", b"tenant", 4),
    ]  # fmt: skip
    assert {(one.codec, one.fmt, one.is_readable) for one in records} == {("float32", "huggingface", True)}
    assert [row[:3] for row in inspection.by_model(records)] == [("first", 3, 20), ("[second]", 2, 13)]
    assert inspection.verify(tier) == (5, [])
    assert inspection.free(tier, 1) == 1 and tier.stats().num_records == 4
    assert inspection.remove_older(tier, 3600) == 0 and inspection.remove_older(tier, -1) == 4
    tier.close()


def test_broken_records_are_found_and_removed(tmp_path) -> None:
    url = fill(tmp_path)
    corrupt(tmp_path)
    tier = inspection.open_tier(url)
    num_whole, broken = inspection.verify(tier)
    assert (num_whole, len(broken)) == (4, 1)
    tier.close()
    result = command("verify", url)
    assert (
        result.exit_code == 1
        and "4 records are whole, 1 are broken" in result.output
        and broken[0].hex() in result.output
    )
    assert command("verify", url, "--delete").exit_code == 1
    result = command("verify", url)
    assert result.exit_code == 0 and "4 records are whole, 0 are broken" in result.output


def test_commands(tmp_path) -> None:
    url = fill(tmp_path)
    result = command("ls", url)
    assert result.exit_code == 0 and "[second]" in result.output and "tenant" in result.output
    listed = json.loads(command("ls", url, "--json").output)
    assert len(listed) == 5 and {one["model"] for one in listed} == {"first", "[second]"}
    assert "5 records" in command("stat", url).output
    stats = json.loads(command("stat", url, "--json").output)
    assert (stats["num_records"], stats["capacity"]) == (5, 4 << 20)
    assert [one["records"] for one in stats["models"]] == [3, 2]
    assert "0 records removed" in command("gc", url, "--older-than", "1h").output
    assert "5 records removed" in command("gc", url, "--free", "1GiB").output
    assert json.loads(command("ls", url, "--json").output) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["ls", "nowhere"], "a tier must be a URL"),
        (["ls", "tape://x"], "scheme must be one of"),
        (["stat", "disk:///proc/nothing/here?size=1MiB"], "kvpage store:"),
        (["gc", "URL"], "give either --free or --older-than"),
        (["gc", "URL", "--free", "1GiB", "--older-than", "1h"], "give either --free or --older-than"),
        (["gc", "URL", "--older-than", "soon"], "an age must be like"),
        (["gc", "URL", "--free", "much"], "a size must be like"),
    ],
)
def test_wrong_arguments_end_in_one_line(tmp_path, arguments: list[str], message: str) -> None:
    url = fill(tmp_path)
    result = command(*(url if one == "URL" else one for one in arguments))
    assert result.exit_code != 0 and message in str(result.exception) + result.output
    assert not isinstance(result.exception, (ValueError, OSError))


def test_looking_changes_nothing(tmp_path) -> None:
    """Whatever size the URL names: the segments of a larger tier stay, and no directory is made."""
    url = f"disk://{tmp_path}?size=12MiB&segment=4MiB"
    with KVStore(KVStoreConfig(8, (url,)), KVStoreMetadata("first", kv_dtype=torch.float32)) as store:
        for n in range(6):
            store.store([n] * 8, torch.randn(2, 2, 8, 2, 8000))
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(files) == 5
    for place in (f"disk://{tmp_path}", f"disk://{tmp_path}?size=1MiB"):
        for name in ("ls", "stat", "verify"):
            assert command(name, place).exit_code == 0
        assert len(json.loads(command("ls", place, "--json").output)) == 6
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == files
    assert command("ls", f"disk://{tmp_path}/other").exit_code != 0 and not (tmp_path / "other").exists()


def test_damaged_headers_are_told(tmp_path) -> None:
    url = fill(tmp_path)
    (file,) = tmp_path.glob("*.segment")
    with open(file, "r+b") as data:
        data.seek(4096 + 50)
        (before,) = data.read(1)
        data.seek(4096 + 50)
        data.write(bytes([before ^ 1]))
    result = command("verify", url)
    assert result.exit_code == 1 and "4 records are whole, 0 are broken" in result.output
    assert "1 places are damaged" in result.output


def test_records_of_another_key_are_not_checked_and_stay(tmp_path) -> None:
    pytest.importorskip("cryptography")
    files = [tmp_path / name for name in ("old", "new")]
    for number, file in enumerate(files):
        file.write_text(f"key-{number} {number:064x}\n")
    url = f"disk://{tmp_path}/kv?size=8MiB&segment=4MiB&seal_key_file="
    with KVStore(KVStoreConfig(8, (f"{url}{files[0]}",)), KVStoreMetadata("m", kv_dtype=torch.float32)) as store:
        store.store(TOKENS, torch.randn(2, 2, 20, 3, 4))
        num_tokens = store.lookup(TOKENS)
        assert "has it open" in command("ls", f"{url}{files[0]}").output
    result = command("verify", "--delete", f"{url}{files[1]}")
    assert result.exit_code == 0 and "3 are not checked: their key is not here" in result.stdout
    result = command("verify", f"{url}{files[0]}")
    assert num_tokens == len(TOKENS) and "3 records are whole, 0 are broken" in result.stdout
