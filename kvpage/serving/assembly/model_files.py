"""load_model_files and load_tokenizer_files: a model and its tokenizer from a local folder, whole or not at all.

A folder is written by others. Its Python code runs only where the caller trusts it. A file that is damaged, or lacks a
weight, is refused in one sentence: transformers would fill up missing weights with random ones.
"""

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers

TRUST_OPTION = "--trust-remote-code"
TEMPLATE_FILE = "chat_template.json"  # of folders that have a processor beside the tokenizer
MAX_REASON = 300  # characters


def load_tokenizer_files(folder: Path, trusts_code: bool = False) -> Any:
    """Load a tokenizer of transformers, with the chat template of its folder.

    Args:
        folder: The model's folder.
        trusts_code: Whether Python code of the folder may run.

    Returns:
        The tokenizer.

    Raises:
        ValueError: There is none that can be read, or it needs code that is not trusted.
    """
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trusts_code
        )
        _add_template(tokenizer, folder / TEMPLATE_FILE)
    except _unreadable() as error:
        _check_trust(folder, error)
        reason = _reason(error)
        raise ValueError(f"MODEL must hold a tokenizer, {folder} has none that can be read: {reason}") from error
    return tokenizer


def load_model_files(folder: Path, dtype: torch.dtype | str, trusts_code: bool = False, **more: Any) -> Any:
    """Load a language model of transformers, with every weight that it has.

    Args:
        folder: The model's folder.
        dtype: The type of the weights; "auto" takes the one that the folder states.
        trusts_code: Whether Python code of the folder may run.
        **more: More arguments of `from_pretrained`.

    Returns:
        The model, in eval mode.

    Raises:
        ValueError: A file is missing, damaged or no language model's, lacks weights, or needs code that is not trusted.
    """
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(  # its annotation knows no loading info
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=trusts_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **more,
        )
    except _unreadable() as error:
        _check_trust(folder, error)
        raise ValueError(f"MODEL must be a language model of transformers: {_reason(error)}") from error
    model, problems = loaded
    for rule, name in (("hold every weight of the model", "missing_keys"), ("have its shapes", "mismatched_keys")):
        if wrong := sorted(str(key[0] if isinstance(key, tuple) else key) for key in problems[name]):
            raise ValueError(f"MODEL must {rule}, {folder} has {len(wrong)} that do not: {', '.join(wrong[:3])}, ...")
    return model.train(False)


def _add_template(tokenizer: Any, path: Path) -> None:
    """Give the tokenizer the template of a processor, where it has none of its own."""
    if not getattr(tokenizer, "chat_template", None) and path.is_file():
        template = json.loads(path.read_text())["chat_template"]
        if not isinstance(template, str):
            raise TypeError(f"{path.name} must hold one template, got {type(template).__name__}")
        tokenizer.chat_template = template


def _unreadable() -> tuple[type[Exception], ...]:
    """Return the errors that readers of damaged files raise: those of torch, pickle, JSON and safetensors."""
    from safetensors import SafetensorError

    plain = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError, EOFError, ImportError)
    return (*plain, UnpicklingError, SafetensorError, *_strict_errors())


def _strict_errors() -> tuple[type[Exception], ...]:
    """Return the error that transformers 5 raises for a wrong value in config.json."""
    try:
        from huggingface_hub.errors import StrictDataclassError
    except ImportError:
        return ()
    return (StrictDataclassError,)


def _check_trust(folder: Path, error: Exception) -> None:
    if "trust_remote_code" in str(error):
        how = f"read it, and allow it by {TRUST_OPTION}"
        raise ValueError(f"MODEL must need no Python code of its own, {folder} brings some: {how}") from error


def _reason(error: Exception) -> str:
    """Return an error as one short line."""
    text = " ".join(str(error).split())
    return text[:MAX_REASON] or type(error).__name__
