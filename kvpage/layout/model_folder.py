"""check_model_folder: a folder that holds a model of transformers."""

from pathlib import Path

CONFIG_FILE = "config.json"


def check_model_folder(folder: Path) -> None:
    """Check that a model may be in a folder; nothing is loaded.

    Args:
        folder: The folder.

    Raises:
        ValueError: There is no such folder, or no model's configuration in it.
    """
    if not folder.is_dir():
        raise ValueError(
            f"MODEL must be a folder with a model and its tokenizer, {folder} is none; "
            "`kvpage demo --save DIR` writes a small one, to try the server with"
        )
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"MODEL must be a folder with a {CONFIG_FILE}, {folder} has none")
