"""The threads' part of `kvpage bench prefix`: the control is measured beside every case, in the same rows."""

from kvpage.benchmarks import prefix_threads
from kvpage.benchmarks.prefix_threads import CONTROL, NUM_THREADS, measure_threads, show_threads


def test_the_control_comes_first_with_all_numbers_of_threads(monkeypatch, capsys):
    monkeypatch.setattr(
        prefix_threads, "CASES", {name: prefix_threads.CASES[name] for name in (CONTROL, "allocate(1)")}
    )
    rows = measure_threads(rounds=1, seconds=0.001)
    assert [(row["case"], row["threads"]) for row in rows] == [
        (case, num) for case in (CONTROL, "allocate(1)") for num in NUM_THREADS
    ]
    assert {tuple(row) for row in rows} == {("case", "threads", "calls_s", "alone_calls_s", "ratio")}
    assert all(row["ratio"].median == 1 for row in rows if row["threads"] == 1)
    show_threads(rows)
    printed = capsys.readouterr().out
    assert printed.count("\ncontrol ") == len(NUM_THREADS)
    assert "alone: one thread that does the work of all in turns" in printed
    assert "control: plain Python without a call of kvpage; its ratio is the bound that the GIL sets" in printed


def test_the_control_calls_nothing_of_kvpage():
    names = {name for code in prefix_threads.counting.__code__.co_consts if hasattr(code, "co_names")
             for name in code.co_names}  # fmt: skip
    assert names == {"range", "repeated"}
    assert prefix_threads.counting(3)(0)() == 20


def test_one_thread_alone_takes_turns_at_the_work_of_all():
    done = []

    def work(thread):
        return lambda: done.append(thread) or 1

    call = prefix_threads.in_turns(work, 3)(0)
    assert [call() for _ in range(7)] == [1] * 7
    assert done == [0, 1, 2, 0, 1, 2, 0]
