"""EventConfig: where and how the events of the cache are published."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvpage.checks.values import check_at_least

Encoding = Literal["map", "array"]
SpecKind = Literal["full_attention", "mla_attention"]
"""The kinds of cache by vLLM's names: K and V of heads, or latents."""


@dataclass(frozen=True, slots=True)
class EventConfig:
    """A stream of cache events over ZeroMQ, for routers. It needs the extra `events`.

    Tokens, and salts as names of namespaces, are sent in clear. Do not publish them where prompts may not go.

    Attributes:
        endpoint: Where the PUB socket binds; loopback unless another address is given. A port of `*` takes a free one.
        replay_endpoint: Where a ROUTER socket binds that sends past batches again; None for none.
        topic: The first frame of every message, by which subscribers filter.
        window: Number of past batches that can be requested one by one. Older ones come as one batch, their sum.
        high_water_mark: Number of batches that may wait for the sending thread, and at the PUB socket for each
            subscriber.
        encoding: "map": named fields, as vLLM has sent events since its change 42892, and replays with the topic, as
            since 45177. "array": fields by position, and replays without the topic, as before.
        connect: Whether the PUB socket connects instead, to a router that has bound its SUB socket.
        data_parallel_rank: Sent with every batch.
        lora_names: The namespaces that are adapters, with their names. Any other namespace is sent as a cache salt.

    Raises:
        ValueError: A number, endpoint or encoding is wrong.
        TypeError: A text is of another type.
    """

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    window: int = 10_000
    high_water_mark: int = 100_000
    encoding: Encoding = "map"
    connect: bool = False
    data_parallel_rank: int = 0
    lora_names: Mapping[bytes, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("window", 0), ("high_water_mark", 1), ("data_parallel_rank", 0)):
            check_at_least(name, getattr(self, name), least)
        for name in ("endpoint", "replay_endpoint", "topic"):
            text = getattr(self, name)
            if not isinstance(text, str) and not (text is None and name == "replay_endpoint"):
                raise TypeError(f"{name} must be a str, got {type(text).__name__}")
        if "://" not in self.endpoint:
            raise ValueError(f"endpoint must name a transport, as in tcp://127.0.0.1:5557, got {self.endpoint!r}")
        if self.replay_endpoint is not None and "://" not in self.replay_endpoint:
            raise ValueError(f"replay_endpoint must name a transport, or be None, got {self.replay_endpoint!r}")
        if self.encoding not in ("map", "array"):
            raise ValueError(f'encoding must be "map" or "array", got {self.encoding!r}')
