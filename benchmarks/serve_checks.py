"""The gate of a load test: a server that answers wrongly is not measured."""

from dataclasses import dataclass
from typing import Any

from kvpage.benchmarks.serve_client import ServeClient
from kvpage.benchmarks.serve_load import Target, ask, texts_of
from kvpage.benchmarks.serve_requests import ServeRequest


class WrongAnswer(Exception):
    """The first thing that is wrong about a server's answers."""


async def find_model(name: str, client: ServeClient, asked: str | None) -> str:
    """Return the model that is asked for, else the first that the server names.

    Raises:
        WrongAnswer: The server lacks the model, or names none.
        ServeError: The server does not answer.
    """
    try:
        listed = (await client.call("GET", "/v1/models")).body()
        models = [str(one["id"]) for one in listed["data"]]
    except (KeyError, TypeError) as error:
        raise WrongAnswer(f"{name}: /v1/models lists no models") from error
    if asked is not None and asked not in models:
        raise WrongAnswer(f"{name}: model must be one of {', '.join(models)}, got {asked!r}")
    if not models:
        raise WrongAnswer(f"{name}: /v1/models lists no models")
    return asked or models[0]


@dataclass(frozen=True, slots=True)
class Checked:
    """The answer to one prompt. repeats: whether it was the same each time, and as a stream."""

    text: str
    repeats: bool


async def check(target: Target, request: ServeRequest) -> Checked:
    """Ask for one prompt twice, and once as a stream.

    Raises:
        WrongAnswer: The numbers of usage do not add up, or a stream does not come to its end.
        ServeError: The server does not answer, or refuses the request.
    """
    whole = [(await target.client.call("POST", target.path, target.body(request, stream=False))).body() for _ in "12"]
    for answer in whole:
        _check_usage(target, request, answer.get("usage") or {})
    streamed = await ask(target, request)
    if streamed.status != "ok":
        raise WrongAnswer(f"{target.name}: a stream ends with {streamed.status}: {streamed.error}")
    usage = whole[0]["usage"]
    if (streamed.num_prompt_tokens, streamed.num_output_tokens) != (usage["prompt_tokens"], usage["completion_tokens"]):
        raise WrongAnswer(f"{target.name}: a stream and a whole answer differ in usage")
    texts = {streamed.text, *("".join(texts_of(answer.get("choices") or [])) for answer in whole)}
    return Checked(streamed.text, len(texts) == 1)


def _check_usage(target: Target, request: ServeRequest, usage: dict[str, Any]) -> None:
    found = [usage.get(name, -1) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    if -1 in found or found[0] + found[1] != found[2]:
        raise WrongAnswer(f"{target.name}: usage must add up, got {usage}")
    if target.endpoint == "completions" and found[0] != len(request.prompt):
        raise WrongAnswer(f"{target.name}: a prompt of {len(request.prompt)} tokens is counted as {found[0]}")
    if found[1] > request.max_tokens or (dict(target.extra).get("ignore_eos") and found[1] != request.max_tokens):
        raise WrongAnswer(f"{target.name}: {request.max_tokens} tokens were asked for, {found[1]} are counted")
