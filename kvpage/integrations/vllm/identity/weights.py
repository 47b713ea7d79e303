"""weights_name: a name that no other weights have, of a model that vLLM serves."""

from pathlib import Path
from typing import Any

from kvpage.store.doors.weight_files import files_name, hub_name


def weights_name(model: str, name: str | None, config: Any = None) -> str:
    """Return the name under which a store keeps a model's K and V.

    Args:
        model: The model's folder or file, or its name on the hub, as vLLM was given it.
        name: A name that the user gave; None for a digest of every byte of the folder, but for hidden files, or for
            the commit of the hub's cache.
        config: vLLM's whole configuration; None if it was not found. A model that drafts is named, too.

    Returns:
        The name. Folders with other bytes have other names.

    Raises:
        ValueError: No name was given, and the model is neither a folder or file nor in the hub's cache; or the folder
            is empty; or vLLM streams the weights from elsewhere.
    """
    if name is not None:
        return f"named {name}"
    model_config, load_config = getattr(config, "model_config", None), getattr(config, "load_config", None)
    streamed = getattr(model_config, "model_weights", None)
    if streamed:
        raise ValueError(f"weights must be given for weights that are streamed from {streamed}, got none")
    cache = getattr(load_config, "download_dir", None)
    names = [_name_of(model, getattr(model_config, "revision", None), cache)]
    drafting = getattr(config, "speculative_config", None)
    draft_config = getattr(drafting, "draft_model_config", None)
    draft = getattr(draft_config, "model", None)
    if draft and draft != model:
        names.append(f"draft {_name_of(draft, getattr(draft_config, 'revision', None), cache)}")
    return " ".join(names)


def _name_of(model: str, revision: str | None, cache: str | None) -> str:
    try:
        name = files_name(Path(model)) or hub_name(model, revision, cache)
    except ValueError as error:
        raise ValueError(f"weights must be given for a folder without files, got none for {model}") from error
    if name is None:
        raise ValueError(
            f"weights must be given for a model that is neither a folder here nor in the hub's cache, such as "
            f'"{model}@revision", got none'
        )
    return name
