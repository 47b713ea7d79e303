"""Suspects: the search for the request with which a step raises.

    a batch raises            [ a b c d e ]     the first time: it may have been chance, all are tried once more
    it raises again           [ a b ] [ c d e ]            each half by itself
    a half raises             [ a b ]   ok      [ c ] [ d e ]
    one alone raises                            [ c ] ok    [ d ] raises: it ends    [ e ] ok

A request passes when it gets its next token. Each failure makes the groups smaller, each success makes them fewer. So
the search ends, after about 2 * log2(requests) steps for one culprit.
"""

from collections.abc import Sequence

from kvpage.serving.loop.request import Request


class Suspects:
    """Requests that were in a step that raised, and have had no token since."""

    def __init__(self) -> None:
        self._failed: set[Request] = set()
        self._groups: list[list[Request]] = []  # to be tried by themselves, the next one last

    @property
    def group(self) -> list[Request]:
        """The only requests to compute now; empty while all may be."""
        return self._groups[-1] if self._groups else []

    def blame(self, requests: Sequence[Request]) -> bool:
        """Note that a step of these, at least one, has raised; return whether that was the first time for all."""
        is_first = self._failed.isdisjoint(requests)
        self._failed.update(requests)
        return is_first

    def narrow(self, requests: Sequence[Request]) -> Request | None:
        """Note that they raised again: the next step computes fewer. Return the culprit if there is only one."""
        if self._groups:
            rest = [request for request in self._groups.pop() if request not in requests]
            self._groups += [rest] if rest else []
        if len(requests) == 1:
            return requests[0]
        middle = len(requests) // 2
        self._groups += [list(requests[middle:]), list(requests[:middle])]
        return None

    def clear(self, requests: Sequence[Request]) -> None:
        """Clear requests that have a token, or have ended."""
        if not self._failed or self._failed.isdisjoint(requests):  # the former at once, in most steps
            return
        self._failed.difference_update(requests)
        groups = ([request for request in group if request not in requests] for group in self._groups)
        self._groups = [group for group in groups if group]
