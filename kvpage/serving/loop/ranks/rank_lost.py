"""RankLost: the error of an engine whose ranks can no longer compute together."""


class RankLost(RuntimeError):
    """A rank is gone, hangs, or has failed alone. The engine cannot compute any more: start all ranks again."""
