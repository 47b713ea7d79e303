"""What benchmarks measure with: a clock around parts of a call, against a clock by hand; a peer in another process."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpage.benchmarks import peer_process
from kvpage.benchmarks.part_clock import PartClock, Spent, mean_spent, spent_by
from kvpage.benchmarks.peer_process import PeerProcess


class Work:
    """Takes 1 of a clock by itself, and 10 inside another part, twice."""

    def __init__(self) -> None:
        self.now = 0.0

    def outer(self) -> str:
        self.now += 1
        self.inner()
        self.inner()
        return "done"

    def inner(self) -> None:
        self.now += 10

    def failing(self) -> None:
        self.now += 5
        self.inner()
        raise KeyError("failed")


def test_parts_do_not_contain_the_parts_inside_them() -> None:
    work, own = Work(), vars(Work).copy()
    clock = PartClock({"outer": [(Work, "outer")], "inner": [(Work, "inner")]}, lambda: work.now)
    with clock:
        assert work.outer() == "done"
        work.inner()
    work.outer()
    assert clock.seconds == {"outer": 1, "inner": 30}
    assert {name: vars(Work)[name] for name in own} == own, "the functions are as they were"


def test_a_part_that_raises_is_clocked() -> None:
    work = Work()
    with PartClock({"all": [(Work, "failing")], "inner": [(Work, "inner")]}, lambda: work.now) as clock:
        with pytest.raises(KeyError):
            work.failing()
        work.inner()
    assert clock.seconds == {"all": 5, "inner": 20}


def test_a_part_that_is_not_there_is_said() -> None:
    with pytest.raises(AttributeError, match="missing"):
        PartClock({"gone": [(Work, "missing")]})


def test_functions_of_a_namespace_are_clocked() -> None:
    """As a module's are, that another module has imported by name."""
    module = SimpleNamespace(call=lambda value: value + 1)
    with PartClock({"call": [(module, "call")]}) as clock:
        assert module.call(2) == 3
    assert clock.seconds["call"] > 0


def test_times_are_means() -> None:
    calls: list[int] = []
    spent = spent_by(lambda: calls.append(0), number=3)
    assert len(calls) == 3 and spent.wall > 0
    assert mean_spent([Spent(1.0, 2.0), Spent(3.0, 6.0)]) == Spent(2.0, 4.0)


PEER = """
import json, os, sys
print(json.dumps({"arguments": sys.argv[1:], "path": os.environ.get("PYTHONPATH")}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "end" in asked:
        sys.exit(asked["end"])
    print(json.dumps({"doubled": 2 * asked["number"]}), flush=True)
"""


ANSWERS = """
import sys
sys.path.insert(0, {folder!r})
from peer_answers import answer_lines, own_output
answers = own_output()
print("a library's own words")
answer_lines(answers, {{"ready": True}}, lambda number: print("more words") or {{"doubled": 2 * number}})
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "peer.py"
    path.write_text(PEER)
    return str(path)


def test_a_peer_answers_each_line(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees none of the modules that this process is told to find."""
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    with PeerProcess.start(Path(sys.executable), script, ["a", "b"]) as peer:
        assert peer.hello == {"arguments": ["a", "b"], "path": None}
        assert [peer.ask(number=number) for number in (1, 2)] == [{"doubled": 2}, {"doubled": 4}]


def test_a_peer_that_ends_is_said(script: str) -> None:
    with (
        pytest.raises(RuntimeError, match="the peer ended with exit code 3"),
        PeerProcess.start(Path(sys.executable), script, []) as peer,
    ):
        peer.ask(end=3)


def test_what_a_peer_prints_is_no_answer(tmp_path: Path) -> None:
    script = tmp_path / "answers.py"
    script.write_text(ANSWERS.format(folder=str(Path(peer_process.__file__).parent)))
    with PeerProcess.start(Path(sys.executable), str(script), []) as peer:
        assert peer.hello == {"ready": True}
        assert [peer.ask(number=number) for number in (1, 2)] == [{"doubled": 2}, {"doubled": 4}]
