"""HarmonyParser: answers of gpt-oss, which are messages in channels.

<|channel|>analysis<|message|>The user asks ...<|end|>                                                  a thought
<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"city": "Bonn"}  a call
<|start|>assistant<|channel|>final<|message|>It rains.                                                  content
"""

import regex

from kvpage.server.answers.calls.answer_parser import BLANKS, AnswerParser, Wait

HEAD = regex.compile(
    rf"{BLANKS}(?:<\|start\|>)?(?P<head>[^<]{{0,256}}(?:<\|channel\|>[^<]{{0,256}})?(?:<\|constrain\|>[^<]{{0,64}})?)"
    r"<\|message\|>"
)
TOOL = regex.compile(r"to=(?:functions\.)?(?P<name>[^\s<]+)")
END = regex.compile(r"<\|(?:end|call|return)\|>|(?P<rest><\|(?:start|channel)\|>)")
THOUGHT = "analysis"


class HarmonyParser(AnswerParser):
    """Parses answers of gpt-oss."""

    def _parse(self) -> Wait:
        while self._text or not self._is_over:
            match = yield from self._matched(HEAD)
            if match is None:
                yield from self._rest()
                return
            head = match["head"]
            tool = TOOL.search(head) if self.asked.tools else None
            if tool is not None:
                self._begin_call(tool["name"])
            is_thought = f"<|channel|>{THOUGHT}" in head
            take = self._add_arguments if tool else self._add_thought if is_thought else self._add_content
            yield from self._until(END, take)
            yield from self._skip_blanks()
