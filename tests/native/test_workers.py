"""The threads that native calls share: they wait for calls, survive forks, and serve several callers at once."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from kvpage import _C

SIZE, NUM_COLUMNS, NUM_ROWS = 256, 480, 64  # so small that torch computes with one thread
NUM_CALLS = 1000
CHILD_SECONDS = 300


class Product:
    """A product that is worth several threads. `runs_right` computes it once more."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.x, self.weight = torch.randn(NUM_ROWS, SIZE), torch.randn(NUM_COLUMNS, SIZE)
        self.expected = self.run(1)

    def run(self, num_threads: int) -> torch.Tensor:
        out = torch.full((NUM_ROWS, NUM_COLUMNS), 7.0)
        places = [(each.data_ptr(), each.stride(0) * 4) for each in (self.x, self.weight, out)]
        sizes = (NUM_ROWS, NUM_COLUMNS, SIZE)
        _C.linear(places[0], places[1], (0, 0), 0, places[2], sizes, 0, 0, num_threads)
        return out

    def runs_right(self, num_threads: int = 3) -> bool:
        return torch.equal(self.run(num_threads), self.expected)


def num_threads_of_process() -> int:
    return len(os.listdir("/proc/self/task"))


def in_child(check) -> int:
    """The exit code of a forked child: 0 where `check` returned true there. A child that hangs is killed."""
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_SECONDS)
        os._exit(0 if check() else 1)
    return os.waitpid(child, 0)[1]


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads through /proc")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@needs_proc
def test_a_thousand_short_calls_start_no_more_threads_than_one():
    product = Product()
    assert product.runs_right()
    before = num_threads_of_process()
    assert all(product.runs_right() for _ in range(NUM_CALLS))
    assert num_threads_of_process() == before


@needs_proc
def test_callers_at_once_share_the_threads():
    """Eight callers want three more threads each; the pool is as large as one wish."""
    products = [Product(seed) for seed in range(8)]
    assert products[0].runs_right(4)
    before, most, right = num_threads_of_process(), [], []

    def call(product: Product) -> None:
        for _ in range(100):
            right.append(product.runs_right(4))
            most.append(num_threads_of_process())

    callers = [threading.Thread(target=call, args=(product,)) for product in products]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(right) and len(right) == 800
    assert max(most) <= before + len(callers)


@forks
@needs_fork
def test_a_child_starts_its_own():
    product = Product()
    assert product.runs_right()
    assert in_child(lambda: all(product.runs_right() for _ in range(20))) == 0
    assert in_child(lambda: in_child(product.runs_right) == 0) == 0
    assert product.runs_right()


@forks
@needs_fork
def test_forks_while_other_threads_call():
    product, is_over, right = Product(), threading.Event(), []

    def call() -> None:
        while not is_over.is_set():
            right.append(product.runs_right())

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    try:
        codes = [in_child(product.runs_right) for _ in range(20)]
    finally:
        is_over.set()
        for caller in callers:
            caller.join()
    assert codes == [0] * 20 and all(right)


FEW_THREADS = """
import resource
import torch
torch.set_num_threads(1)
from native.test_workers import Product, num_threads_of_process
product = Product()
assert product.runs_right(3)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
before = num_threads_of_process()
assert product.runs_right(8)
print(num_threads_of_process() - before)
"""


def run_script(text: str, **options) -> str:
    folder = os.path.dirname(os.path.dirname(__file__))
    paths = [folder, os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, "-c", text], env=environ, capture_output=True, text=True, timeout=CHILD_SECONDS, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_proc
def test_fewer_threads_than_asked_for_and_an_end_while_they_look_for_work():
    is_unlimited = os.getuid() == 0  # limits of processes do not bind root
    assert int(run_script(FEW_THREADS)) == (5 if is_unlimited else 0)


def test_signals_stay_with_the_callers_threads():
    """A signal that only the main thread's mask lets through reaches it, whatever the workers do."""
    product, seen = Product(), []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(threading.current_thread()))
    try:
        for _ in range(20):
            assert product.runs_right()
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen and set(seen) == {threading.main_thread()}
