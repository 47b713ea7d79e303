"""The OpenAI API over an AsyncEngine. It needs the extra `serve`."""

try:
    import fastapi  # noqa: F401
except ModuleNotFoundError as error:
    message = "the server needs the extra 'serve': pip install 'kvpage[serve]'"
    raise ModuleNotFoundError(message, name=error.name) from error

from kvpage.server.app import create_app
from kvpage.server.config import ApiKey, ServerConfig

__all__ = ["ApiKey", "ServerConfig", "create_app"]
