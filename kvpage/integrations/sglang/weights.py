"""ServedModel: the weights that SGLang serves, and its settings that their K and V depend on besides the tokens.

SGLang's configuration ─► where the weights are ─► a folder, or a snapshot of the hub ─► a name that others lack
                       └► dtypes, quantization, overrides of the model's configuration ─► a digest
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

SETTINGS = (
    "load_format", "model_loader_extra_config", "model_impl", "json_model_override_args", "dtype", "quantization",
    "kv_cache_dtype", "qsa_indexer_dtype", "modelopt_quant", "rl_quant_profile", "speculative_algorithm",
    "speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype",
)  # fmt: skip
PLACES = (
    "model_path", "revision", "download_dir", "quantization_param_path", "speculative_draft_model_path",
    "speculative_draft_model_revision", "checkpoint_engine_wait_weights_before_ready",
)  # fmt: skip
ELSEWHERE = ("dummy", "remote", "remote_instance", "private")
"""Formats that name other weights than the path's."""
WHOLE_BYTES = 1 << 20
"""Of files that are read whole. Larger ones are read at NUM_SAMPLES places, and have their time in the name."""
NUM_SAMPLES, SAMPLE_BYTES = 8, 1 << 14
BLOBS = "blobs"
"""A folder of the hub's cache, in which each file is named by a digest of its bytes."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """SGLang's configuration of its model.

    Attributes:
        values: Of SETTINGS and PLACES, by their names. None where SGLang does not tell.
    """

    values: Mapping[str, Any] | None = None

    @classmethod
    def here(cls) -> "ServedModel":
        """Return the model of this process of SGLang."""
        try:
            from sglang.srt.runtime_context import get_context

            leaf = get_context().config_leaf
            leaf("model_path")
        except (ImportError, AttributeError, ValueError):  # another version, or no server is here
            return cls()
        return cls({name: _leaf(leaf, name) for name in (*SETTINGS, *PLACES)})

    @property
    def kv_cache_dtype(self) -> str | None:
        """The dtype of K and V, if one was chosen."""
        chosen = (self.values or {}).get("kv_cache_dtype")
        return None if chosen in (None, "auto") else str(chosen)

    def settings(self) -> str:
        """Return a digest of the settings that K and V depend on, and of their scales."""
        values = self.values or {}
        scales = values.get("quantization_param_path")
        parts = [str(values.get(name)) for name in SETTINGS] + [_file_name(Path(scales)) if scales else "none"]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def weights(self) -> str:
        """Return a name of the weights, and of a drafting model's: of their files, or of the hub's commit.

        Raises:
            ValueError: SGLang does not tell where they are, or they are not there.
            OSError: A file cannot be read.
        """
        values = self.values
        if values is None or not values.get("model_path"):
            raise _unnamed("SGLang does not tell where the weights are")
        if values.get("load_format") in ELSEWHERE or values.get("checkpoint_engine_wait_weights_before_ready"):
            raise _unnamed("the weights come from elsewhere than the path")
        name = self._at("model_path", "revision")
        if values.get("speculative_draft_model_path"):
            name += f" draft {self._at('speculative_draft_model_path', 'speculative_draft_model_revision')}"
        return name

    def _at(self, path_name: str, revision: str) -> str:
        values = self.values or {}
        path = Path(values[path_name])
        if path.is_file():
            return f"file {_file_name(path)}"
        if path.is_dir():
            return _folder_name(path)
        commit = _snapshot(str(values[path_name]), values.get(revision), values.get("download_dir"))
        if commit is None:
            raise _unnamed(f"{path_name} {values[path_name]} is no folder here, nor in the hub's cache")
        return f"hub {values[path_name]} {commit}"


def _leaf(leaf: Any, name: str) -> Any:
    try:
        return leaf(name)
    except ValueError:  # a version without it
        return None


def _unnamed(why: str) -> ValueError:
    return ValueError(f"model must be named in the extra config where {why}, got None")


def _snapshot(repository: str, revision: str | None, cache: str | None) -> str | None:
    """Return the commit of the hub that this revision is here; None if there is none."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        config_path = try_to_load_from_cache(repository, "config.json", cache_dir=cache, revision=revision)
    except HFValidationError:  # a URL, or a path that is not there
        return None
    return Path(config_path).parent.name if isinstance(config_path, str) else None


def _folder_name(folder: Path) -> str:
    """Return a digest of the names and contents of all files that are not hidden."""
    files = sorted(_files(folder))
    if not files:
        raise _unnamed(f"the folder {folder} has no files")
    parts = [f"{file.relative_to(folder)} {_file_name(file)}" for file in files]
    return f"folder {hashlib.sha256(repr(parts).encode()).hexdigest()}"


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [child for child in folders if not child.startswith(".")]
        yield from (Path(parent, name) for name in names if not name.startswith(".") and Path(parent, name).is_file())


def _file_name(file: Path) -> str:
    """Return the name that tells a file from others: its digest, or its size, time and parts of its bytes."""
    real, status = file.resolve(), file.stat()
    if real.parent.name == BLOBS:
        return real.name
    if status.st_size <= WHOLE_BYTES:
        return xxhash.xxh3_128_hexdigest(real.read_bytes())
    step = (status.st_size - SAMPLE_BYTES) // (NUM_SAMPLES - 1)
    digest = xxhash.xxh3_128()
    with real.open("rb", buffering=0) as opened:
        for number in range(NUM_SAMPLES):
            digest.update(os.pread(opened.fileno(), SAMPLE_BYTES, number * step))
    return f"{status.st_size} {status.st_mtime_ns} {digest.hexdigest()}"
