"""OutOfBlocks: the one error of the domain. Every other misuse is a ValueError or a TypeError.

OutOfSlots is the same of state slots. Who waits for blocks waits for slots, too. OptionError is a ValueError.
"""


class OutOfBlocks(RuntimeError):
    """A pool lacks blocks for a call that allocates all or nothing. The call has changed nothing.

    Attributes:
        needed: Blocks that the call asked for.
        free: Blocks that it could have had.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free)
        self.needed = needed
        self.free = free

    def __str__(self) -> str:
        return f"needed {self.needed} blocks, {self.free} are free"


class OutOfSlots(OutOfBlocks):
    """No state slot is free, and no checkpoint can be evicted. The call has changed nothing."""

    def __str__(self) -> str:
        return f"needed {self.needed} state slots, {self.free} are free"


class OptionError(ValueError):
    """An option does not go with a model that is served without it."""
