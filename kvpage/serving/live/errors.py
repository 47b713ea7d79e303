"""QueueFull and EngineClosed: the reasons why an AsyncEngine takes no request."""


class QueueFull(RuntimeError):
    """Too many requests wait. Submit it again later.

    Attributes:
        retry_after: Seconds after which about half of the queue will have gone, by the rate of the last requests.
    """

    def __init__(self, num_waiting: int, retry_after: float) -> None:
        """Make it.

        Args:
            num_waiting: Requests that wait.
            retry_after: Seconds.
        """
        super().__init__(f"{num_waiting} requests wait, which is the most; try again in {retry_after:.1f} s")
        self.retry_after = retry_after


class EngineClosed(RuntimeError):
    """The AsyncEngine drains, is closed, or its thread has failed."""
