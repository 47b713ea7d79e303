"""TokenLogprobs: how likely the model held one token, and which ones it held for the likeliest."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities of one token and of the likeliest ones in its place.

    They are log_softmax of the model's own logits in fp32: before penalties, masks, temperature and other rules.

    Attributes:
        logprob: That of the token.
        rank: 1 for the likeliest token, 2 for the next one and so on. Equally likely tokens have the same rank.
        top: Ids and log-probabilities of the likeliest tokens, the likeliest first, of equal ones the smaller id.
    """

    logprob: float
    rank: int
    top: list[tuple[int, float]]
