"""One server for the tests of a module, called without a socket."""

from collections.abc import Iterator

import pytest

for needed in ("fastapi", "httpx", "transformers"):
    pytest.importorskip(needed)

from support.server_app import Server, running_server  # noqa: E402
from support.threads import one_thread  # noqa: E402, F401


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as found:
        yield found
        assert found.live.stats().num_unfinished == 0, "a request was left behind"
