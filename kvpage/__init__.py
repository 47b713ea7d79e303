"""kvpage: the paged KV cache of a language-model server, as a library.

Importing it needs neither a GPU nor Triton nor transformers.
"""

from kvpage.errors import OutOfBlocks  # isort: skip  (the extension looks it up)
from kvpage import _C

__version__: str = _C.build_info()["version"]

__all__ = ["OutOfBlocks", "__version__"]
