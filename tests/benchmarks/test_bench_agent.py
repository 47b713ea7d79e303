"""`kvpage bench agent`: its script, its gates, and a short run on kvpage's server."""

import json
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

from kvpage.benchmarks import bench_agent  # noqa: E402
from kvpage.benchmarks.agent_bound import AgentBound  # noqa: E402
from kvpage.benchmarks.agent_run import Answer, TurnCost, WrongTurn, check_same  # noqa: E402
from kvpage.benchmarks.agent_script import DELEGATE, MAIN, PARAMETERS, SUBAGENTS, AgentScript, Turn, tools  # noqa: E402
from kvpage.tools.cli import app  # noqa: E402

SIZES: dict[str, int] = {"num_turns": 40, "num_sub_turns": 5, "system_words": 20, "result_words": 3}


def turns_of(seed: int = 0, **sizes: int) -> list[Turn]:
    return list(AgentScript(**{**SIZES, **sizes}, seed=seed).turns())


def test_an_agent_has_its_turns_tools_and_subagents() -> None:
    turns = turns_of()
    assert Counter(turn.conversation for turn in turns) == {MAIN: 40, **dict.fromkeys(SUBAGENTS, 5)}
    assert {turn.tool for turn in turns} == {*PARAMETERS, None} and len(tools()) == 5
    assert [turn.tool for turn in turns].count(DELEGATE) == 1
    begin = next(index for index, turn in enumerate(turns) if turn.tool == DELEGATE) + 1
    assert [turn.conversation for turn in turns[begin : begin + 10]] == [*SUBAGENTS] * 5


def test_a_prompt_goes_on_from_the_one_before() -> None:
    last: dict[str, Turn] = {}
    for turn in turns_of():
        before = last.get(turn.conversation)
        if before is not None:
            messages = [*before.messages, before.message()]
            assert list(turn.messages[: len(messages)]) == messages and turn.messages[-1]["role"] == "tool"
        last[turn.conversation] = turn
    main, first, second = (last[name] for name in (MAIN, *SUBAGENTS))
    assert first.messages[0] == second.messages[0] == main.messages[0] and first.messages != second.messages


def test_seeds_give_other_words_of_the_same_length() -> None:
    one, other = turns_of(1), turns_of(2)
    assert [len(turn.text) for turn in one] == [len(turn.text) for turn in other]
    assert all(a.messages[0] != b.messages[0] for a, b in zip(one, other, strict=True))
    assert turns_of(1) == one


def chunk(content: str | None = None, usage: Any = None, **call: str) -> Any:
    calls = [SimpleNamespace(function=SimpleNamespace(**{"name": None, "arguments": None, **call}))] if call else None
    choice = SimpleNamespace(delta=SimpleNamespace(content=content, tool_calls=calls))
    return SimpleNamespace(choices=[] if usage else [choice], usage=usage)


def test_an_answer_is_put_together_and_compared() -> None:
    turn = next(turn for turn in turns_of() if turn.tool == "read")
    answer, arguments = Answer(), json.dumps(turn.arguments)
    pieces = [chunk(), chunk(turn.words[:3]), chunk(turn.words[3:] + "\n"), chunk(name="read")]
    pieces += [chunk(arguments=arguments[:5]), chunk(arguments=arguments[5:]), chunk(usage="usage")]
    for number, piece in enumerate(pieces):
        answer.take(piece, float(number))
    answer.check(turn)
    assert (answer.first, answer.usage) == (1.0, "usage")
    for wrong in (
        Answer(),
        Answer(turn.words),
        Answer(turn.words, ["run"], arguments),
        Answer("x", ["read"], arguments),
    ):
        with pytest.raises(WrongTurn, match="must be"):
            wrong.check(turn)


def test_servers_that_count_differently_or_too_little_are_refused() -> None:
    turn = turns_of()[0]
    one, other = TurnCost(turn, 0.1, 0.2, 10, 4), TurnCost(turn, 0.1, 0.2, 11, 4)
    check_same({"kvpage": [one], "vllm": [one]})
    with pytest.raises(WrongTurn, match="the same tokens"):
        check_same({"kvpage": [one], "vllm": [other]})
    bench_agent.check_bound("kvpage", [one], [6])
    with pytest.raises(WrongTurn, match="must compute 7 tokens at least, got 6"):
        bench_agent.check_bound("kvpage", [one], [7])


def test_the_bound_are_the_tokens_that_no_earlier_prompt_has() -> None:
    class Letters:
        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [*text.encode()]}

        def apply_chat_template(self, messages: list[Any], **_: Any) -> str:
            return "".join(str(message["content"]) for message in messages)

    def turn(*texts: str, words: str = "!") -> Turn:
        return Turn(MAIN, 1, tuple({"role": "user", "content": text} for text in texts), words, None, {})

    turns = [turn("abc"), turn("abc", "!", "de"), turn("ab", "x"), turn("abc"), turn("abc!", words="?")]
    bound = AgentBound(Letters())
    assert [bound.needed(turn) for turn in turns] == [3, 2, 1, 1, 1]


def test_rows_sums_and_a_picture(tmp_path: Any) -> None:
    turns = turns_of(num_turns=4, num_sub_turns=1)
    rounds = [[TurnCost(turn, 0.1 + number, 0.3 + number, 20, 12) for turn in turns] for number in range(2)]
    costs, needed = {"kvpage": rounds, "vllm": rounds}, [5] * len(turns)
    rows, sums = bench_agent.rows_of(costs, needed), bench_agent.sums_of(costs, needed)
    assert len(rows) == 2 * len(turns) and (rows[0]["computed"], rows[0]["first_ms"].median) == (8, 600.0)
    assert [row["computed"] for row in sums] == [8 * len(turns)] * 2
    bench_agent.plot(rows, tmp_path / "agent.png")
    assert (tmp_path / "agent.png").stat().st_size > 1000


def test_an_agent_on_kvpages_server(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    pytest.importorskip("llguidance")
    monkeypatch.setattr(sys, "argv", sys.argv)
    few = ["--model", "tiny", "--turns", "4", "--sub-turns", "1", "--system-words", "5", "--rounds", "1"]
    done = CliRunner().invoke(app, ["bench", "agent", *few])
    assert done.exit_code == 0, (done.output, done.exception)
    result = json.loads(done.stdout.splitlines()[-1])
    [sums] = result["sums"]
    assert sums["turns"] == len(result["rows"]) == 6
    assert sums["needed"] <= sums["computed"] <= sums["needed"] + 6 * 16  # a part of a block is computed again


def test_wrong_options() -> None:
    with pytest.raises(SystemExit):
        bench_agent.options_of("", ["--turns", "3"])
