"""ModelLimits: the engine's values that the parameters of requests depend on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits and defaults of a model.

    Attributes:
        max_model_len: Tokens of a request at most, generated ones included, by the model and by the blocks.
        temperature: For requests that have none: that of a model that states how it samples, else 1.
        max_retain_priority: Priority of a prompt's blocks that a hint may ask for at most.
    """

    max_model_len: int
    temperature: float
    max_retain_priority: int
