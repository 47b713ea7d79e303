"""ServedModel: the weights that SGLang serves, and its settings that their K and V depend on besides the tokens.

SGLang's configuration ─► where the weights are ─► a folder, or a snapshot of the hub ─► a name that others lack
                       └► dtypes, quantization, overrides of the model's configuration ─► a digest
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpage.store.doors.weight_files import files_name, hub_name

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
        parts = [str(values.get(name)) for name in SETTINGS] + [str(files_name(Path(scales))) if scales else "none"]
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
        model = str(values[path_name])
        name = files_name(Path(model)) or hub_name(model, values.get(revision), values.get("download_dir"))
        if name is None:
            raise _unnamed(f"{path_name} {model} is no folder here, nor in the hub's cache")
        return name


def _leaf(leaf: Any, name: str) -> Any:
    try:
        return leaf(name)
    except ValueError:  # a version without it
        return None


def _unnamed(why: str) -> ValueError:
    return ValueError(f"model must be named in the extra config where {why}, got None")
