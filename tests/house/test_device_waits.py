"""Whoever waits for a whole device takes the lock of captures: CUDA lets no thread wait while a stream is captured."""

from pathlib import Path

PROJECT = Path(__file__).parents[2]
ALLOWED = {"kvpage/checks/device_lock.py", "kvpage/serving/loop/graphs/capture.py"}


def test_the_lock_is_taken() -> None:
    sources = [path for folder in ("kvpage", "kernels") for path in (PROJECT / folder).rglob("*.py")]
    waiting = {str(path.relative_to(PROJECT)) for path in sources if "torch.cuda.synchronize(" in path.read_text()}
    assert waiting == ALLOWED
