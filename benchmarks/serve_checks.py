"""The gate of a load test: a server that answers wrongly is not measured."""

from typing import Any

from kvpage.benchmarks.serve_client import ServeClient
from kvpage.benchmarks.serve_load import Target, ask, text_of
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
        models = [str(one["id"]) for one in (await client.call("GET", "/v1/models"))["data"]]
    except (KeyError, TypeError):
        models = []
    if not models:
        raise WrongAnswer(f"{name}: /v1/models lists no models")
    if asked is not None and asked not in models:
        raise WrongAnswer(f"{name}: model must be one of {', '.join(models)}, got {asked!r}")
    return asked or models[0]


async def check(target: Target, request: ServeRequest) -> bool:
    """Ask for one prompt twice, and once as a stream. Return whether the text was the same each time.

    Raises:
        WrongAnswer: The numbers of usage do not add up, or a stream does not come to its end.
        ServeError: The server does not answer, or refuses the request.
    """
    whole = [await target.client.call("POST", target.path, target.body(request, stream=False)) for _ in "12"]
    usages = [answer.get("usage") or {} for answer in whole]
    streamed = await ask(target, request)
    wrong = [_fault_of_usage(target, request, usage) for usage in usages]
    if streamed.status != "ok":
        wrong.append(f"a stream ends with {streamed.status}: {streamed.error}")
    numbers = usages[0].get("prompt_tokens"), usages[0].get("completion_tokens")
    if (streamed.num_prompt_tokens, streamed.num_output_tokens) != numbers:
        wrong.append("a stream and a whole answer differ in usage")
    if said := next(filter(None, wrong), None):
        raise WrongAnswer(f"{target.name}: {said}")
    return len({streamed.text, *map(text_of, whole)}) == 1


def _fault_of_usage(target: Target, request: ServeRequest, usage: dict[str, Any]) -> str | None:
    num_prompt, num_output, total = (usage.get(f"{name}_tokens", -1) for name in ("prompt", "completion", "total"))
    if -1 in (num_prompt, num_output, total) or num_prompt + num_output != total:
        return f"usage must add up, got {usage}"
    if target.endpoint == "completions" and num_prompt != len(request.prompt):
        return f"a prompt of {len(request.prompt)} tokens is counted as {num_prompt}"
    is_exact = dict(target.extra).get("ignore_eos") and num_output != request.max_tokens
    if num_output > request.max_tokens or is_exact:
        return f"{request.max_tokens} tokens were asked for, {num_output} are counted"
    return None
