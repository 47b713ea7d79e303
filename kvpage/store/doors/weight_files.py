"""Names of weights by their files, for engines that load them by themselves.

a file, a folder      ─► a digest of every byte; other bytes have another name, wherever they lie
a model of the hub    ─► its commit: the cache names what was downloaded by it
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

PART_BYTES = 1 << 24


def files_name(path: Path) -> str | None:
    """Return a name that no other files have; None where there is no file or folder.

    Args:
        path: A file or a folder. Hidden files of a folder do not count, nor does its own name.

    Returns:
        The name.

    Raises:
        ValueError: The folder has no files.
        OSError: One cannot be read.
    """
    if path.is_file():
        return f"file {_digest(path)}"
    if not path.is_dir():
        return None
    files = sorted(_files(path))
    if not files:
        raise ValueError(f"a folder of weights must have files, got none in {path}")
    whole = hashlib.sha256()
    for file in files:
        whole.update(os.fsencode(file.relative_to(path)) + f" {_digest(file)};".encode())
    return f"folder {whole.hexdigest()}"


def is_named(model: str | None, facts: Mapping[str, Any]) -> bool:
    """Return whether a store's header is of a model.

    Args:
        model: A name that the user gave, or that the header has; or the folder of the weights. None for any.
        facts: The header, with the names that `files_name` or `hub_name` gave.

    Returns:
        Whether it is.

    Raises:
        OSError: A file of the folder cannot be read.
    """
    if model is None:
        return True
    weights = str(facts.get("weights"))
    if model in (facts.get("model"), weights, weights.removeprefix("named ")):
        return True
    files = files_name(Path(model)) if Path(model).exists() else None
    return weights.split(" draft ")[0] == files if files else weights.startswith(f"hub {model} ")


def hub_name(repository: str, revision: str | None, cache: str | None) -> str | None:
    """Return a name of a model of the hub by its commit; None if it is not in the hub's cache.

    Args:
        repository: As the engine was given it, such as "you/model".
        revision: A branch, tag or commit; None for the main branch.
        cache: The folder of the cache; None for the hub's own.
    """
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        config_path = try_to_load_from_cache(repository, "config.json", cache_dir=cache, revision=revision)
    except HFValidationError:  # a URL, or a path that is not there
        return None
    return f"hub {repository} {Path(config_path).parent.name}" if isinstance(config_path, str) else None


def _files(folder: Path) -> Iterator[Path]:
    """Walk over the files that are not hidden, also in linked folders, but in no circle."""
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, onerror=_fail, followlinks=True):
        seen.add(os.path.realpath(parent))
        folders[:] = [child for child in folders if not child.startswith(".") and _real(parent, child) not in seen]
        yield from (Path(parent, name) for name in names if not name.startswith(".") and Path(parent, name).is_file())


def _fail(error: OSError) -> None:
    """A folder that cannot be read is an error: without its files other weights would have the same name."""
    raise error


def _real(parent: str, name: str) -> str:
    return os.path.realpath(os.path.join(parent, name))


def _digest(path: Path) -> str:
    """Return the digest of a file's bytes, read part by part."""
    digest, part = xxhash.xxh3_128(), bytearray(PART_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(part):
            digest.update(memoryview(part)[:count])
    return digest.hexdigest()
