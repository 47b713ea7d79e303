"""long_list: a list as JSON, in parts: while one part is encoded, nothing else runs."""

import json
from collections.abc import Iterable
from itertools import islice
from typing import Any

PART = 1024  # elements
ENCODE = json.JSONEncoder(separators=(",", ":")).encode


def long_list(values: Iterable[Any]) -> str:
    """Return values as a JSON list without spaces.

    Args:
        values: The values, which may be made one by one.
    """
    iterator, parts = iter(values), list[str]()
    while part := list(islice(iterator, PART)):
        parts.append(ENCODE(part)[1:-1])
    return f"[{','.join(parts)}]"
