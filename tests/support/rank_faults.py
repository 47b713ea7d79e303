"""Ranks that are slow, hang, or fail early: `python rank_faults.py FOLDER` leaves there what each of them has seen.

Each pair of ranks is a process of its own with two forks; the pairs work at once, and mostly sleep.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.rank_models import VOCAB, run_ranks, save_model, sharded_model
from support.rank_work import CONFIG, Seat, prompts, raise_for

from kvpage.serving import Engine, SamplingParams
from kvpage.serving.assembly import engine_parts
from kvpage.serving.loop.ranks import rank_watch
from kvpage.store import BlockStore

TIMEOUT = 3.0
SLOW = VOCAB - 2  # a token with which a step takes longer than TIMEOUT
LIMIT = 240.0  # seconds for all; it takes 25, and more on a busy machine
FAULTY = replace(CONFIG, rank_timeout=TIMEOUT, tensor_parallel_size=2, store_deadline=30.0)


class ActingStore(BlockStore):
    """A store that holds nothing, and acts when it is asked."""

    def __init__(self, act: Callable[[], object] = lambda: None) -> None:
        self.act = act

    def lookup(self, tokens: Any, **_: Any) -> int:
        self.act()
        return 0

    def load_blocks(self, *_: Any, **__: Any) -> int:
        return 0

    def store_blocks(self, *_: Any, **__: Any) -> int:
        return 0


def stop() -> None:
    """Hang, with all sockets open."""
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_other(seat: Seat) -> None:
    os.kill(int((seat.folder / f"pid-{1 - seat.rank}").read_text()), signal.SIGKILL)


def serve(seat: Seat, name: str, model: PreTrainedModel, store: Any, work: Callable[[Engine], Any]) -> None:
    """Do the work on rank 0, while the other follows; note the results, and that the rank has ended."""
    if seat.rank:
        seat.note(name, lambda: Engine.follow(model, FAULTY, store=store))
        return
    engine = Engine.from_model(model, FAULTY, store=store)
    seat.note(name, lambda: work(engine))
    seat.note(f"{name}: closed", engine.close)


def generated(engine: Engine, token: int) -> list[int]:
    return engine.generate([[*prompts()[2], token]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids


def slow(seat: Seat, model: PreTrainedModel) -> None:
    """Rank 1 begins late. Then a step takes long, while another thread asks the stores."""
    asked: list[int] = []

    def ask(engine: Engine) -> None:
        asked.append(engine.debug.store.store.lookup(torch.arange(64, dtype=torch.int32).numpy(), namespace=b""))

    def work(engine: Engine) -> Any:
        asker = threading.Thread(target=ask, args=(engine,))

        def act() -> None:
            if not asker.ident:
                asker.start()
            time.sleep(1.6 * TIMEOUT)

        raise_for(model, SLOW, act)
        found = len(generated(engine, SLOW))
        asker.join()
        return found, asked

    check = engine_parts.check_servable
    if seat.rank:
        engine_parts.check_servable = lambda *arguments: time.sleep(2.5 * TIMEOUT) or check(*arguments)
        raise_for(model, SLOW, lambda: time.sleep(1.6 * TIMEOUT))
    serve(seat, "slow", model, ActingStore(), work)
    engine_parts.check_servable = check


def hung(seat: Seat, model: PreTrainedModel, rank: int) -> None:
    """One rank hangs in its store. The other must be able to end, as an interpreter does."""
    store = ActingStore(stop if seat.rank == rank else lambda: None)
    serve(seat, "hung", model, store, lambda engine: generated(engine, 5))
    seat.note("hung: ended", threading._shutdown)
    kill_other(seat)


def unmade(seat: Seat, model: PreTrainedModel) -> None:
    """The engine of rank 0 is not made, while rank 1 computes a collective for it. The process lives on."""

    def fail(*_: Any, **options: Any) -> None:
        time.sleep(TIMEOUT / 3)  # in which the other comes to the collective
        raise ArithmeticError("no memory here")

    rank_watch.RankWatch.__init__.__defaults__ = (rank_watch.end_process, 1.0)  # a short grace
    if seat.rank:
        seat.note("unmade", lambda: Engine.follow(model, FAULTY))
        return
    engine_parts.check_servable = fail
    seat.note("unmade", lambda: Engine.from_model(model, FAULTY))
    time.sleep(3 * TIMEOUT)


def begin(seat: Seat, models: Path) -> PreTrainedModel:
    (seat.folder / f"pid-{seat.rank}").write_text(str(os.getpid()))
    return sharded_model(models / "llama")


def of_rank_1(seat: Seat, models: Path) -> None:
    model = begin(seat, models)
    slow(seat, model)
    hung(seat, model, rank=1)


def of_rank_0(seat: Seat, models: Path) -> None:
    hung(seat, begin(seat, models), rank=0)


def of_none(seat: Seat, models: Path) -> None:
    unmade(seat, begin(seat, models))


def pair(work: Callable[[Seat, Path], None], models: Path) -> int:
    """Let a pair work in a process of its own; return its number."""
    folder = models / work.__name__
    folder.mkdir()
    child = os.fork()
    if child == 0:
        statuses = run_ranks(2, lambda rank: work(Seat(rank, 2, folder), models))
        (folder / "statuses.json").write_text(json.dumps(statuses))
        os._exit(0)
    return child


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    save_model("llama", folder)
    children, end = {pair(work, folder) for work in (of_rank_1, of_rank_0, of_none)}, time.monotonic() + LIMIT
    while children and time.monotonic() < end:
        children -= {child for child in children if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.1)
    if children:  # then a test finds something missing
        for path in folder.glob("*/pid-*"):
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
