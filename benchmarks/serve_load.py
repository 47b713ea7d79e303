"""A load: requests on their way to a server, at their times or so many at once, and the outcome of each.

open     each request is sent at its time of arrival, whether the server keeps up or not
closed   so many are open at once; the next is sent when one has ended
both     as open, but a request waits while so many are open; its time counts from its arrival

A server that answers wrongly is not measured: see `check`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvpage.benchmarks.serve_client import Reply, ServeClient, ServeError, words_of
from kvpage.benchmarks.serve_requests import ServeRequest

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request. Times are in seconds of time.perf_counter().

    begin: when it was sent, or should have been. times: of each chunk with text. num_output_tokens: as the server
    counts them, else the chunks. error: of a failed one.
    """

    status: Literal["ok", "aborted", "failed"]
    begin: float
    end: float
    times: tuple[float, ...] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    text: str = ""
    error: str = ""

    def measures(self) -> dict[str, list[float]]:
        """Return the milliseconds of each measure of a complete request."""
        gaps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        num_later = self.num_output_tokens - 1
        later = [(self.times[-1] - self.times[0]) / num_later] if num_later > 0 else []
        found = {"ttft": [self.times[0] - self.begin], "tpot": later, "itl": gaps, "e2e": [self.end - self.begin]}
        return {name: [value * 1000 for value in values] for name, values in found.items()}


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how it is asked. endpoint: of PATHS. extra: fields beside OpenAI's, such as ignore_eos."""

    name: str
    client: ServeClient
    model: str
    endpoint: str = "completions"
    extra: tuple[tuple[str, Any], ...] = (("ignore_eos", True),)

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    def body(self, request: ServeRequest, stream: bool = True) -> dict[str, Any]:
        """Return the request in OpenAI's words."""
        fields: dict[str, Any] = {"model": self.model, "max_tokens": request.max_tokens, "temperature": 0.0}
        if self.endpoint == "chat":
            text = " ".join(f"w{token}" for token in request.prompt)
            fields["messages"] = [{"role": "user", "content": text}]
        else:
            fields["prompt"] = request.prompt
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return fields | dict(self.extra)


async def ask(target: Target, request: ServeRequest) -> Outcome:
    """Send a request, and wait for its end."""
    return (await run_load(target, [request], None, lambda: None))[0]


async def run_load(
    target: Target, requests: Sequence[ServeRequest], concurrency: int | None, note: Callable[[], object]
) -> list[Outcome]:
    """Run all requests; return their outcomes in the same order. note: called at each end.

    Requests with times of arrival are sent then, the others at once. concurrency: how many are open at most; None for
    any number. Bytes are made before the load and read after it, so that a client on the server's cores costs little.
    """
    data = [target.client.request("POST", target.path, target.body(request)) for request in requests]
    gate = asyncio.Semaphore(concurrency or len(requests))
    start = time.perf_counter()

    async def send(request: ServeRequest, data: bytes) -> Reply:
        due = None if request.arrival is None else start + request.arrival
        if due is not None:
            await asyncio.sleep(due - time.perf_counter())
        async with gate:
            begin = time.perf_counter() if due is None else due
            try:
                reply = await target.client.send(data, begin, request.leaves_after)
            except ServeError as error:
                reply = Reply(begin, end=time.perf_counter(), error=str(error))
        note()
        return reply

    return [outcome_of(reply) for reply in await asyncio.gather(*map(send, requests, data))]


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


def outcome_of(reply: Reply) -> Outcome:
    """Read the answer to a streamed request. A stream that breaks off without its usage has failed."""
    if reply.is_aborted:
        return Outcome("aborted", reply.begin, reply.end)
    try:
        reply.check()
        return _read(reply)
    except (ServeError, ValueError) as error:  # ValueError: the framing of chunks
        return Outcome("failed", reply.begin, reply.end, error=str(error))


def _read(reply: Reply) -> Outcome:
    times, texts, usage = [], [], None
    for when, event in reply.events():
        if event.get("error"):
            raise ServeError(words_of(event))
        usage = event.get("usage") or usage
        choices = event.get("choices") or []
        if choices and text_of(event) + str(choices[0].get("token_ids") or ""):
            times.append(when)
            texts.append(text_of(event))
    if usage is None:
        raise ServeError("the stream has no usage")
    num_prompt, num_output = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or max(len(times), 1)
    num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    moments = tuple(times) or (reply.end,)  # tokens may have no text
    return Outcome("ok", reply.begin, reply.end, moments, num_prompt, num_output, num_cached, "".join(texts))


def text_of(answer: dict[str, Any]) -> str:
    """Return the text of an answer's choices, or of an event's."""
    choices = answer.get("choices") or []
    parts = [one.get("delta") or one.get("message") or {"content": one.get("text")} for one in choices]
    return "".join(part.get("content") or "" for part in parts)
