"""Transcript: the outputs of one prompt, as pieces of its choices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvpage.server.answers.calls.answer_parser import AnswerParser
from kvpage.server.answers.calls.said import Said
from kvpage.server.answers.choice import Choice
from kvpage.server.answers.formats import Piece
from kvpage.server.answers.logprobs import Logprobs, LogprobsFormat
from kvpage.server.protocol.errors import ApiError, bad_request
from kvpage.serving.loop.outputs import RequestOutput, StepOutput
from kvpage.serving.text.token_logprobs import TokenLogprobs

GUIDE_FAILED = "the guide cannot go on"  # the begin of an engine's error
TOKENS_AT_ONCE = 512  # of a prompt with log-probabilities: other streams go on between two pieces


@dataclass(frozen=True, slots=True)
class Shown:
    """The parts of an answer that a request has asked for, beside the text.

    Attributes:
        logprobs: Writes log-probabilities; None for none.
        token_ids: Whether token ids are shown.
        echo: Whether the prompt comes first.
        no_tokens: Whether nothing but the prompt is shown, as with max_tokens=0.
    """

    logprobs: LogprobsFormat | None = None
    token_ids: bool = False
    echo: bool = False
    no_tokens: bool = False

    @property
    def scores_prompt(self) -> bool:
        """Whether an echo has log-probabilities, too: they come with the first token."""
        return self.echo and self.logprobs is not None


class Transcript:
    """The choices of one prompt.

    Args:
        choices: One a sample.
        prompt_ids: The prompt's tokens.
        prompt_text: Its text, for an echo.
        shown: The parts of the answer.
        parsers: One a choice, which tell thoughts and calls of tools from content. None at all: all is content.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        prompt_ids: Sequence[int],
        prompt_text: str,
        shown: Shown,
        parsers: Sequence[AnswerParser] = (),
    ) -> None:
        self.choices, self._parsers = choices, parsers
        self._prompt_ids, self._prompt_text, self._shown = prompt_ids, prompt_text, shown
        self._held: list[StepOutput] | None = [] if shown.scores_prompt else None  # until the prompt can be shown

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated so far, of all samples."""
        return 0 if self._shown.no_tokens else sum(choice.num_tokens for choice in self.choices)

    def begin(self) -> list[Piece]:
        """Return the pieces that come before the first token: the prompts of an echo without log-probabilities."""
        if self._shown.scores_prompt or not (self._shown.echo or self._shown.token_ids):
            return []
        return [self._prompt_piece(choice, "null") for choice in self.choices]

    @property
    def waits(self) -> bool:
        """Whether it holds outputs until the log-probabilities of its prompt are known."""
        return self._held is not None

    def hold(self, outputs: Sequence[StepOutput]) -> list[StepOutput]:
        """Keep outputs for later; return all that are kept."""
        if self._held is None:
            self._held = []
        self._held.extend(outputs)
        return self._held

    def echo(self, prompt_logprobs: Logprobs | None) -> Iterator[Piece]:
        """Hold no more; yield the pieces of the prompt, each of some tokens. None: the request has failed."""
        self._held = None
        ids, shown = self._prompt_ids, self._shown.logprobs
        if prompt_logprobs is None or shown is None:
            return
        for choice in self.choices:
            for begin in range(0, len(ids), TOKENS_AT_ONCE):
                part = slice(begin, begin + TOKENS_AT_ONCE)
                logprobs = shown.json(choice, ids[part], prompt_logprobs[part])
                yield Piece(choice.index, "", logprobs) if begin else self._prompt_piece(choice, logprobs)

    def _prompt_piece(self, choice: Choice, logprobs: str) -> Piece:
        prompt_ids = list(self._prompt_ids) if self._shown.token_ids else None
        text = self._prompt_text if self._shown.echo else ""
        return Piece(choice.index, text, logprobs, prompt_token_ids=prompt_ids)

    def take(self, outputs: Sequence[StepOutput]) -> list[Piece]:
        """Return the pieces that the outputs of some steps make. ApiError if the request has failed."""
        if len(self.choices) == 1:
            pieces = [self._piece(self.choices[0], outputs)]
        else:
            groups: dict[int, list[StepOutput]] = {}
            for output in outputs:
                groups.setdefault(output.sample_index, []).append(output)
            pieces = [self._piece(self.choices[index], group) for index, group in groups.items()]
        return [piece for piece in pieces if piece is not None]

    def whole(self, output: RequestOutput) -> list[Piece]:
        """Return each choice as one piece. ApiError if the request has failed."""
        pieces = []
        for choice, sample in zip(self.choices, output.samples, strict=False):
            check_outcome(sample.finish_reason, sample.error)
            text = choice.end(sample.token_ids, sample.finish_reason, sample.stop_reason, sample.text)
            token_ids, logprobs = list(sample.token_ids), list[TokenLogprobs | None](sample.logprobs or ())
            if self._shown.no_tokens:
                text, token_ids, logprobs = "", [], []
            ids = token_ids if self._shown.token_ids else None
            prompt_ids = list(self._prompt_ids) if self._shown.token_ids else None
            if self._shown.echo:
                text = self._prompt_text + text
                token_ids = [*self._prompt_ids, *token_ids]
                logprobs = [*(output.prompt_logprobs or ()), *logprobs]
            shown = "null" if self._shown.logprobs is None else self._shown.logprobs.json(choice, token_ids, logprobs)
            reason = "length" if self._shown.no_tokens else sample.finish_reason
            said = self._said(choice, text, is_last=True)
            piece = Piece(
                choice.index, said.content, shown, ids, _reason(choice, reason), choice.stop_reason, prompt_ids
            )
            pieces.append(piece._replace(reasoning=said.reasoning, calls=said.calls))
        return pieces

    def _said(self, choice: Choice, text: str, is_last: bool) -> Said:
        """Return what the next text of a choice says."""
        if not self._parsers:
            return Said(text)
        parser = self._parsers[choice.index - self.choices[0].index]
        said = parser.feed(text)
        if is_last:
            said.add(parser.finish())
        choice.note_calls(len(said.calls))
        return said

    def _piece(self, choice: Choice, outputs: Sequence[StepOutput]) -> Piece | None:
        """Return the next piece of a choice; None if there is nothing to show."""
        last, shown = outputs[-1], self._shown
        if last.finish_reason is not None:
            check_outcome(last.finish_reason, last.error)
        token_ids = [output.token_id for output in outputs if output.token_id is not None]
        if last.finish_reason is None:
            text = choice.take(token_ids)
        else:
            text = choice.end(token_ids, last.finish_reason, last.stop_reason, last.text)
        if shown.no_tokens:
            return None if last.finish_reason is None else Piece(choice.index, "", finish_reason="length")
        said = self._said(choice, text, last.finish_reason is not None)
        if not said and last.finish_reason is None and shown.logprobs is None and not shown.token_ids:
            return None
        logprobs = "null"
        if shown.logprobs is not None and token_ids:
            logprobs = shown.logprobs.json(choice, token_ids, [output.logprobs for output in outputs])
        ids = token_ids if shown.token_ids else None
        reason = _reason(choice, last.finish_reason)
        piece = Piece(choice.index, said.content, logprobs, ids, reason, choice.stop_reason)
        return piece._replace(reasoning=said.reasoning, calls=said.calls) if self._parsers else piece


def _reason(choice: Choice, reason: str | None) -> str | None:
    """Return why a choice has ended, for clients: an end after calls of tools is one to call them."""
    return "tool_calls" if reason == "stop" and choice.has_calls else reason


def check_outcome(reason: str, error: str | None) -> None:
    """Raise ApiError for a sample that did not come to its end."""
    if reason == "error" and (error or "").startswith(GUIDE_FAILED):
        raise bad_request(f"the form of the answer needs too much work: {error}", code="form_too_large")
    if reason == "error":
        raise ApiError(500, f"the request could not be computed: {error}", code="request_failed")
    if reason == "abort" and error == "deadline":
        raise ApiError(408, "the request reached its deadline, the field timeout", param="timeout", code="deadline")
    if reason == "abort":
        raise ApiError(503, f"the request was aborted: {error or 'the server is closing'}", code="request_aborted")
