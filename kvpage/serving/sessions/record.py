"""SessionRecord: what is written down of a session: its tokens and its terms. K and V are found by the tokens.

a record   [ length of the header | header: JSON, version 1 | the tokens of each branch, int32 ]
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpage.blocks.sequence_state import Ids
from kvpage.serving.sessions.branch import BranchAdapter
from kvpage.serving.sessions.retention import Retention
from kvpage.serving.sessions.session import MAIN, Session

VERSION = 1
LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session on its way into a store, or out of one.

    Attributes:
        branches: The tokens of each branch, int32, by name.
        retention: The terms on which its blocks are kept; None without any.
        num_turns: Its turns.
        adapters: Those of branches that have one, by name.
    """

    branches: Mapping[str, Ids]
    retention: Retention | None
    num_turns: int
    adapters: Mapping[str, BranchAdapter] = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session) -> "SessionRecord":
        """Return what is to be written of a session. Its tokens never change in place.

        Args:
            session: The session.
        """
        branches = {name: session.tokens(name) for name in session.branches}
        return cls(branches, session.retention, session.num_turns, session.adapters)

    def encoded(self) -> bytes:
        """Return the record as bytes."""
        terms = self.retention
        header = {
            "version": VERSION,
            "num_turns": self.num_turns,
            "retention": None if terms is None else [terms.ttl, terms.tier, terms.priority],
            "branches": [[name, len(tokens), *self._adapter(name)] for name, tokens in self.branches.items()],
        }
        text = json.dumps(header).encode()
        paths = [np.ascontiguousarray(tokens, "<i4").tobytes() for tokens in self.branches.values()]
        return b"".join([len(text).to_bytes(LENGTH_BYTES, "little"), text, *paths])

    def _adapter(self, branch: str) -> tuple[str, ...]:
        adapter = self.adapters.get(branch)
        return () if adapter is None else (adapter.name, adapter.digest)

    @classmethod
    def decoded(cls, data: bytes) -> "SessionRecord | None":
        """Return the record that bytes hold; None where they hold none, or one of another version.

        Args:
            data: The bytes.
        """
        begin = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
        try:
            header = json.loads(data[LENGTH_BYTES:begin])
            return cls._of_header(header, data[begin:])
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            return None

    @classmethod
    def _of_header(cls, header: Mapping[str, Any], rest: bytes) -> "SessionRecord | None":
        if header["version"] != VERSION or len(rest) % 4:
            return None
        tokens, branches, begin = np.frombuffer(rest, "<i4").astype(np.int32), dict[str, Ids](), 0
        adapters = dict[str, BranchAdapter]()
        for name, count, *adapter in header["branches"]:
            branches[str(name)] = tokens[begin : begin + int(count)]
            begin += int(count)
            if adapter:
                adapters[str(name)] = BranchAdapter(*map(str, adapter))
        terms, num_turns = header["retention"], int(header["num_turns"])
        if begin != len(tokens) or MAIN not in branches or num_turns < 0:
            return None
        return cls(branches, None if terms is None else Retention(*terms), num_turns, adapters)
