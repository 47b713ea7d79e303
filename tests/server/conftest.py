"""One server for the tests of a module, called without a socket."""

from collections.abc import Iterator

import pytest
import torch

for needed in ("fastapi", "httpx", "transformers"):
    pytest.importorskip(needed)

from support.server_app import Server, running_server  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as found:
        yield found
        assert found.live.stats().num_unfinished == 0, "a request was left behind"
