"""Generation: the way of a completion or a chat through the server.

body ─► prompts ─► Job ─► Runner ─► Transcript ─► AnswerFormat ─► one answer, or a stream of events
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from kvpage.blocks.groups.states.marks import as_cache_at
from kvpage.server.access.keys import Caller
from kvpage.server.access.request_log import record_of
from kvpage.server.answers.calls.answer_parser import AnswerParser
from kvpage.server.answers.choice import Choice, TextRules
from kvpage.server.answers.formats import AnswerFormat, Piece, Usage
from kvpage.server.answers.logprobs import ChatLogprobs, CompletionLogprobs, TokenNames
from kvpage.server.answers.responses import EventStream, WholeAnswer, unless_gone
from kvpage.server.answers.transcript import Shown, Transcript
from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.protocol.completion_request import AnyRequest, CompletionRequest
from kvpage.server.protocol.errors import ApiError, bad_request, checked, failed
from kvpage.server.protocol.kv_hints import Demote, Release
from kvpage.server.protocol.sampling_fields import MAX_SESSION_NAME, SamplingFields
from kvpage.server.running.answer_rules import AnswerRules
from kvpage.server.running.cache_work import CacheWishes
from kvpage.server.running.guides import CompiledGuide, compiled_guide, form_guide
from kvpage.server.running.response_turns import ResponseTurn
from kvpage.server.running.runner import NO_WISHES, Job, abort_all
from kvpage.server.running.sampling import sampling_params
from kvpage.server.service import Service, caller_of
from kvpage.server.text.text_service import Prompt
from kvpage.serving import Detokenizer, LiveRequest, RequestOutput
from kvpage.serving.sessions.session import MAIN

logger = logging.getLogger(__name__)
FEW_TOKENS = 1024  # whose answer is written at once
SESSION_HEADERS = {"session_id": "x-session-id", "session_branch": "x-session-branch"}


Body = TypeVar("Body", bound=SamplingFields)
MakePrompts = Callable[[], Coroutine[Any, Any, Sequence[Prompt]]]


class Generation:
    """One completion or chat.

    Args:
        service: The server's parts.
        body: The request.
        answer_format: How the answer is written.
        turn: Of which session the answer becomes a turn where the request names none; None for none.
    """

    def __init__(
        self, service: Service, body: AnyRequest, answer_format: AnswerFormat, turn: ResponseTurn | None = None
    ) -> None:
        self._service, self._body, self._format, self._turn = service, body, answer_format, turn

    async def job(self, prompts: Sequence[Prompt], caller: Caller) -> Job:
        """Return the engine's work. ApiError 400 for a parameter that does not fit."""
        body, service = self._body, self._service
        service.check_priority(body.priority)
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        cache_at = checked(lambda: as_cache_at(body.cache_at or (), shortest))
        if body.kv_hints is not None:
            cache_at = sorted({*cache_at, *(end for end in body.kv_hints.positions() if end <= shortest)})
        named = body.session_id, body.session_branch, body.kv_hints, self._turn
        asks = any(value is not None for value in named)
        compiled = await self._compiled(prompts[0].text)
        guide = None if compiled is None else compiled.guide
        params = sampling_params(body, [len(prompt.token_ids) for prompt in prompts], guide, service.limits)
        if (adapter := service.adapter_of(body.model)) is not None:
            params = [replace(rules, adapter=adapter) for rules in params]
        return Job(
            [prompt.token_ids for prompt in prompts],
            params,
            caller.namespace(body.cache_salt),
            body.priority,
            body.timeout,
            self._wishes(caller, adapter) if asks else NO_WISHES,
            prompts[0].with_borders(cache_at),  # of several prompts none is a chat's
            compiled=compiled,
        )

    def _wishes(self, caller: Caller, adapter: str | None) -> CacheWishes:
        """Return what the request asks of the cache. ApiError 400 for a session of several answers."""
        body, hints = self._body, self._body.kv_hints
        if body.session_id is not None and (body.num_prompts > 1 or body.n > 1):
            raise bad_request("session_id needs one prompt and n=1", param="session_id")
        if body.session_branch is not None and body.session_id is None:
            raise bad_request("session_branch needs session_id", param="session_branch")
        wishes = CacheWishes(body.session_id, body.session_branch or MAIN, tenant=caller.tenant, adapter=adapter)
        if self._turn is not None:
            wishes = wishes.in_turn(self._turn)
        if hints is None:
            return wishes
        ttl, demotes, releases = hints.pin_ttl(), bool(hints.of_kind(Demote)), bool(hints.of_kind(Release))
        ttl = None if ttl is None else min(ttl, self._service.config.max_pin_seconds)
        next_use = hints.next_use()
        next_use = None if next_use is None else min(next_use, self._service.config.max_pin_seconds)
        return replace(wishes, pin_ttl=ttl, demotes=demotes, releases=releases, next_use=next_use)

    async def _compiled(self, prompt: str) -> CompiledGuide | None:
        """Return the form of the answer; None for any form."""
        body, service = self._body, self._service
        field, make = body.form_field, partial(form_guide, body)
        if isinstance(body, ChatRequest):
            rules = AnswerRules(service.syntax, body, prompt)
            if rules.guide_field is not None:
                field, make = rules.guide_field, partial(rules.guide, service.tokenizer)
        return None if field is None else await service.compile(lambda: compiled_guide(service.engine, field, make))

    def transcripts(self, prompts: Sequence[Prompt]) -> list[Transcript]:
        """Return an empty transcript for each prompt."""
        body, service = self._body, self._service
        ends = {*service.engine.engine.eos_token_ids, *(body.stop_token_ids or ())}
        rules = TextRules(body.stop_strings, ends, body.include_stop_str_in_output, body.skip_special_tokens)
        shown, transcripts = self._shown(), []
        parsers = self._parsers(prompts[0].text)
        detokenizer = Detokenizer(service.tokenizer, body.skip_special_tokens, service.mark_ids if parsers else ())
        if parsers:
            rules = replace(rules, skips_special=False)  # the engine's text has no marks
        for number, prompt in enumerate(prompts):
            indices = range(number * body.n, (number + 1) * body.n)
            choices = [Choice(index, detokenizer.another(), rules) for index in indices]
            transcripts.append(Transcript(choices, prompt.token_ids, prompt.text, shown, parsers))
        return transcripts

    def _parsers(self, prompt: str) -> list[AnswerParser]:
        """Return a parser for each sample of a chat; none where all is content."""
        if not isinstance(self._body, ChatRequest):
            return []
        rules = AnswerRules(self._service.syntax, self._body, prompt)
        parsers = (rules.parser() for _ in range(self._body.n))
        return [parser for parser in parsers if parser is not None]

    def _shown(self) -> Shown:
        body, service = self._body, self._service
        shows_ids = body.return_tokens_as_token_ids
        names = TokenNames(service.vocabulary, service.config.return_tokens_as_ids if shows_ids is None else shows_ids)
        kind = ChatLogprobs if isinstance(body, ChatRequest) else CompletionLogprobs
        logprobs = None if body.num_logprobs is None else kind(names)
        echo = isinstance(body, CompletionRequest) and body.echo
        return Shown(logprobs, body.return_token_ids, echo, echo and body.max_tokens == 0)

    # --- one answer --------------------------------------------------------------------------------------------------

    async def whole(self, job: Job, prompts: Sequence[Prompt]) -> bytes:
        """Return the whole answer. A large one is written beside the event loop."""
        outputs = await self._service.runner.whole(job)
        num_generated = sum(len(sample.token_ids) for output in outputs for sample in output.samples)
        if self._num_shown(job) + num_generated <= FEW_TOKENS:
            return self._answer(job, prompts, outputs)
        return await asyncio.to_thread(self._answer, job, prompts, outputs)

    def _num_shown(self, job: Job) -> int:
        """Return how many tokens of prompts the answer shows."""
        return sum(map(len, job.prompts)) * self._body.n if self._body.shows_prompt else 0

    def _answer(self, job: Job, prompts: Sequence[Prompt], outputs: Sequence[RequestOutput]) -> bytes:
        transcripts, pieces = self.transcripts(prompts), list[Piece]()
        for transcript, output in zip(transcripts, outputs, strict=True):
            pieces += transcript.whole(output)
        num_cached = sum(output.num_cached_tokens for output in outputs)
        usage = Usage(sum(map(len, job.prompts)), _num_tokens(transcripts), num_cached)
        return self._format.whole(pieces, usage)

    # --- a stream ----------------------------------------------------------------------------------------------------

    async def events(
        self, job: Job, transcripts: Sequence[Transcript], requests: Sequence[LiveRequest]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream. An error is an event, too: the status was sent before."""
        usage = Usage(sum(map(len, job.prompts)), cached_tokens=0)
        try:
            if self._num_shown(job) <= FEW_TOKENS:
                begin = self._begin(transcripts, usage)
            else:
                begin = await asyncio.to_thread(self._begin, transcripts, usage)
            if begin:
                yield begin
            async with aclosing(self._service.runner.stream(job, requests)) as turns:
                async for number, outputs in turns:
                    transcript = transcripts[number]
                    if transcript.waits:
                        outputs, logprobs = transcript.hold(outputs), requests[number].prompt_logprobs
                        if logprobs is None and outputs[-1].output is None:
                            continue
                        for piece in transcript.echo(logprobs):
                            yield self._chunks([piece], transcripts, usage)
                            await asyncio.sleep(0)
                    pieces = transcript.take(outputs)
                    if outputs[-1].output is not None:
                        usage.found(outputs[-1].output.num_cached_tokens)
                    if pieces:
                        yield self._chunks(pieces, transcripts, usage)
            usage.generated(_num_tokens(transcripts))
            if self._body.include_usage:
                yield self._format.last(usage)
        except ApiError as error:
            yield self._format.failure(error)
        except Exception as error:  # of the server's own: the client would see a cut
            logger.error("the stream of a request has failed", exc_info=error)
            yield self._format.failure(failed())
        yield self._format.done

    def _begin(self, transcripts: Sequence[Transcript], usage: Usage) -> bytes:
        num_choices = sum(len(transcript.choices) for transcript in transcripts)
        pieces = [piece for transcript in transcripts for piece in transcript.begin()]
        begin = self._format.begin(num_choices, self._ending(transcripts, usage), usage)
        return begin + self._chunks(pieces, transcripts, usage)

    def _chunks(self, pieces: Sequence[Piece], transcripts: Sequence[Transcript], usage: Usage) -> bytes:
        chunk, ending = self._format.chunk, self._ending(transcripts, usage)
        if len(pieces) == 1:
            return chunk(pieces[0], ending).encode()
        return "".join([chunk(piece, ending) for piece in pieces]).encode()

    def _ending(self, transcripts: Sequence[Transcript], usage: Usage) -> str:
        """Return the field at the end of each chunk."""
        if not self._body.continuous_usage:
            return ',"usage":null' if self._body.include_usage else ""
        usage.generated(_num_tokens(transcripts))
        return f',"usage":{usage.json()}'


def _num_tokens(transcripts: Sequence[Transcript]) -> int:
    return sum(transcript.num_tokens for transcript in transcripts)


async def respond(
    request: Request,
    body: AnyRequest,
    answer_format: AnswerFormat,
    make_prompts: MakePrompts,
    stack: ExitStack,
    turn: ResponseTurn | None = None,
) -> Response:
    """Run a request, and return its answer. ApiError 499 once the client has gone.

    answer_format: how the answer is written.
    make_prompts: called once.
    stack: contexts that end with the request; the answer takes it along.
    turn: of which session the answer becomes a turn where the request names none; None for none.
    """
    service = Service.of(request)
    body = with_session_headers(request, body)
    generation = Generation(service, body, answer_format, turn)
    if body.kv_hints is not None:
        record_of(request.scope).ignored.update(body.kv_hints.left_aside())

    async def prepared() -> tuple[Sequence[Prompt], Job]:
        prompts = await make_prompts()
        return prompts, await generation.job(prompts, caller_of(request))

    prompts, job = await unless_gone(request, prepared())
    if body.stream:
        return _stream(service, generation, job, prompts, stack)
    content = await unless_gone(request, generation.whole(job, prompts))
    return WholeAnswer(content, stack.pop_all().close)


def with_session_headers(request: Request, body: Body) -> Body:
    """Return a body with the session that headers name, where it names none itself. ApiError 400 for a wrong name."""
    if not any(header in request.headers for header in SESSION_HEADERS.values()):
        return body
    names = {field: request.headers.get(header) for field, header in SESSION_HEADERS.items()}
    named = {field: name for field, name in names.items() if name is not None and getattr(body, field) is None}
    for field, name in named.items():
        if not 0 < len(name) <= MAX_SESSION_NAME:
            header = SESSION_HEADERS[field]
            raise bad_request(f"the header {header} must have 1 to {MAX_SESSION_NAME} characters, got {len(name)}")
    return body.model_copy(update=named) if named else body


def _stream(
    service: Service, generation: Generation, job: Job, prompts: Sequence[Prompt], stack: ExitStack
) -> Response:
    """Queue the job, so that a refusal has its own status, and return the stream of its events."""
    requests = service.runner.submit(job)
    stack.callback(abort_all, requests)
    events = generation.events(job, generation.transcripts(prompts), requests)
    return EventStream(events, stack.pop_all().close, service.config.send_timeout)


def answer_id(request: Request, body: AnyRequest, prefix: str) -> str:
    """Return the answer's id: that of the body, or that of the request."""
    return prefix + (body.request_id or record_of(request.scope).request_id)
