"""What a running server has cached of a prompt, for `kvpage explain URL`: POST /kvpage/explain."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from kvpage.store.prompt_reach import printable

PATH = "/kvpage/explain"
TIMEOUT = 60.0  # seconds
MOST_BYTES = 2**24  # of an answer
MOST_SHOWN = 300  # characters of an error that is none of kvpage's


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Goes nowhere else: another host must not get the caller's key."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


@dataclass(frozen=True, slots=True)
class ServerQuestion:
    """A prompt to be explained by a server.

    Attributes:
        url: The server's, with or without /v1.
        body: As of a completion or a chat.
        api_key: The caller's key; None without one. It is in no repr.

    Raises:
        ValueError: The URL is none of HTTP, or no header can have the key.
    """

    url: str
    body: dict[str, Any]
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not _is_http(self.url):
            raise ValueError(f"URL must be like http://127.0.0.1:8000, got {self.url!r}")
        if self.api_key is not None and not _is_plain(self.api_key):
            raise ValueError("the key must have printable ASCII characters, and no blanks")

    def ask(self) -> dict[str, Any]:
        """Return the server's explanation.

        Raises:
            OSError: The server does not answer, or not in HTTP.
            ValueError: It refuses the question, or is none of kvpage's.
        """
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        root = self.url.rstrip("/").removesuffix("/v1")
        request = urllib.request.Request(root + PATH, json.dumps(self.body).encode(), headers)
        opener = urllib.request.build_opener(_NoRedirects)
        try:
            with opener.open(request, timeout=TIMEOUT) as reply:
                return _read(reply.read(MOST_BYTES))
        except urllib.error.HTTPError as error:
            words = printable(_words(error.read(MOST_BYTES)))
            raise ValueError(f"the server refuses with {error.code}: {words}") from error
        except urllib.error.URLError as error:
            raise OSError(f"the server does not answer: {error.reason}") from error
        except HTTPException as error:
            raise OSError(f"the server must answer in HTTP, got {type(error).__name__}") from error


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and _is_plain(url)
    except ValueError:  # for a port or an address that is none
        return False


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


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
