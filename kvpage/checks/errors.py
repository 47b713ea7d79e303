"""The one error of the domain. Everything else that a caller does wrong is a ValueError or a TypeError."""


class OutOfBlocks(RuntimeError):
    """A pool lacks blocks for a call that gives all or nothing; nothing has been changed.

    Attributes: `needed`, the blocks that the call wanted; `free`, those it could have had.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free)
        self.needed = needed
        self.free = free

    def __str__(self) -> str:
        return f"needed {self.needed} blocks, {self.free} are free"
