"""weights_name: a name that no other weights have, by the files of a model's folder."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

PART_BYTES = 1 << 24


def weights_name(model: str, name: str | None) -> str:
    """Return the name under which a store keeps a model's K and V.

    Args:
        model: The model's folder or file, as vLLM was given it.
        name: A name that the user gave; None for a digest of every byte of the folder, but for hidden files. The
            name of the folder is no part of it.

    Returns:
        The name. Folders with other bytes have other names.

    Raises:
        ValueError: The model is no folder or file, or an empty one, and no name was given.
    """
    if name is not None:
        return f"named {name}"
    path = Path(model)
    if path.is_file():
        return f"file {_digest(path)}"
    if not path.is_dir():
        raise ValueError(
            f'weights must be given for a model that is no folder here, such as "{model}@revision", got none'
        )
    files = sorted(_files(path))
    if not files:
        raise ValueError(f"weights must be given for a folder without files, got none for {model}")
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.relative_to(path)} {_digest(file)};".encode())
    return f"folder {whole.hexdigest()}"


def _files(folder: Path) -> Iterator[Path]:
    """Walk over the files that are not hidden, also in linked folders, but in no circle."""
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(parent))
        folders[:] = [child for child in folders if not child.startswith(".") and _real(parent, child) not in seen]
        yield from (Path(parent, name) for name in names if not name.startswith(".") and Path(parent, name).is_file())


def _real(parent: str, name: str) -> str:
    return os.path.realpath(os.path.join(parent, name))


def _digest(path: Path) -> str:
    """Return the digest of a file's bytes, read part by part."""
    digest, part = xxhash.xxh3_128(), bytearray(PART_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(part):
            digest.update(memoryview(part)[:count])
    return digest.hexdigest()
