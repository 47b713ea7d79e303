"""The other end of a PeerProcess: it answers a line of JSON with a line of JSON. It needs nothing but Python."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

Answer = Callable[..., dict[str, Any]]


def own_output() -> TextIO:
    """Return the standard output for answers alone: what else is printed from now on goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer_lines(answers: TextIO, hello: dict[str, Any], answer: Answer) -> None:
    """Say hello, and answer what each line of the input asks for, by name, until it ends."""
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)
