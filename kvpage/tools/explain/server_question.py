"""What a running server has cached of a prompt, for `kvpage explain URL`: POST /kvpage/explain."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

PATH = "/kvpage/explain"
TIMEOUT = 60.0  # seconds
MOST_BYTES = 2**24  # of an answer
MOST_SHOWN = 300  # characters of an error that is none of kvpage's


@dataclass(frozen=True, slots=True)
class ServerQuestion:
    """A prompt to be explained by a server.

    Attributes:
        url: The server's, with or without /v1.
        body: As of a completion or a chat.
        api_key: The caller's key; None without one. It is in no repr.

    Raises:
        ValueError: The URL is none of HTTP.
    """

    url: str
    body: dict[str, Any]
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"URL must be like http://127.0.0.1:8000, got {self.url!r}")

    def ask(self) -> dict[str, Any]:
        """Return the server's explanation.

        Raises:
            OSError: The server does not answer.
            ValueError: It refuses the question, or is none of kvpage's.
        """
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        root = self.url.rstrip("/").removesuffix("/v1")
        request = urllib.request.Request(root + PATH, json.dumps(self.body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                return _read(reply.read(MOST_BYTES))
        except urllib.error.HTTPError as error:
            raise ValueError(f"the server refuses with {error.code}: {_words(error.read(MOST_BYTES))}") from error


def _read(content: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(content)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or answer.get("object") != "explanation":
        raise ValueError(f"the server must be kvpage's, it answers {content[:MOST_SHOWN]!r}")
    return answer


def _words(content: bytes) -> str:
    """Return the words of an error in OpenAI's shape, or those of another one."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return content[:MOST_SHOWN].decode(errors="replace")
