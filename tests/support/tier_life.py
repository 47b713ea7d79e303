"""TierLife: a tier of records beside a dict, with readers that stay open and eviction."""

from collections.abc import Callable

from support.life import Life, Operation
from support.naive_order import NaiveOrder
from support.store_records import get, key, read, record

from kvpage.store.tiers.tier import Reader, Tier

NUM_KEYS, MOST_READERS = 20, 16


class TierLife(Life):
    """make: opens the tier. may_reopen: whether records outlive it. policy: by which those that are not open go, one by
    one. most_bytes: of a record. A reader sees its own record whatever happens to its key.
    """

    def __init__(
        self, seed: int, make: Callable[[], Tier], most_bytes: int, may_reopen: bool = False, policy: str | None = None
    ) -> None:
        super().__init__(seed)
        self.make, self.most_bytes, self.may_reopen = make, most_bytes, may_reopen
        self.order = policy and NaiveOrder(policy)
        self.tier = make()
        self.known: dict[bytes, bytes] = {}
        self.readers: list[tuple[Reader, bytes]] = []

    def operations(self) -> dict[Operation, float]:
        return {self.put: 8, self.open: 8, self.remove: 1, self.read: 3, self.reopen: 0.6 * self.may_reopen}

    def some_key(self) -> bytes:
        return key(self.rng.randrange(NUM_KEYS))

    def put(self) -> None:
        name = self.some_key()
        data = record(name, 4 * self.rng.randint(1, self.most_bytes // 4), seed=self.rng.getrandbits(30))
        writer = self.tier.create(name, len(data))
        self.note_evicted(writer is None)
        if writer is None:
            assert self.readers
            self.figures["refused"] += 1
            return
        with writer:
            for begin in range(0, len(data), 5000):
                end = min(begin + 5000, len(data))
                writer.piece(begin, end)[:] = data[begin:end]
            if self.rng.random() < 0.8:
                assert self.tier.commit([writer]) == [True]
                self.forget(name)
                self.known[name] = data
                if self.order:
                    self.order.add(name)

    def forget(self, name: bytes) -> bool:
        if self.order and name in self.known:
            self.order.remove(name)
        return self.known.pop(name, None) is not None

    def note_evicted(self, is_refused: bool) -> None:
        """What was evicted is forgotten here, too: by the policy the first that nobody reads, as often as need be."""
        gone = set(self.known) - {info.key for info in self.tier.infos()}
        assert not (gone and is_refused), "records went for nothing"
        self.figures["evicted"] += len(gone)
        while gone:
            read = [data for _, data in self.readers]
            victims = self.order.victims() if self.order else list(gone)
            name = next(name for name in victims if not any(data is self.known[name] for data in read))
            gone.remove(name)
            self.forget(name)

    def open(self) -> None:
        name = self.some_key()
        (reader,) = self.tier.open([name])
        assert self.tier.contains([name]) == [reader is not None]
        if reader is not None:
            if self.order:
                self.order.use(name)
            self.readers.append((reader, self.known[name]))
        while len(self.readers) > MOST_READERS:
            self.read()

    def remove(self) -> None:
        name = self.some_key()
        assert self.tier.remove([name]) == int(self.forget(name))

    def read(self) -> None:
        if self.readers:
            reader, data = self.readers.pop(self.rng.randrange(len(self.readers)))
            assert read(reader) == data
            reader.close()
            self.figures["read"] += 1

    def reopen(self) -> None:
        while self.readers:
            self.read()
        self.tier.close()
        self.tier = self.make()
        self.figures["reopened"] += 1

    def stored_bytes(self, data: bytes) -> int:
        """Return the bytes that a record takes in the tier."""
        return len(data)

    def compare(self) -> None:
        for reader, data in self.readers:
            assert bytes(reader.piece(0, reader.num_bytes)) == data
        present = {info.key for info in self.tier.infos()}
        assert present == set(self.known), "a record that was removed, or never committed, is there"
        self.tier.check()
        stats = self.tier.stats()
        assert (stats.num_records, stats.num_bytes) == (len(present), sum(map(self.stored_bytes, self.known.values())))

    def end(self) -> None:
        while self.readers:
            self.read()
        if self.may_reopen:
            self.reopen()
        assert get(self.tier, list(self.known)) == list(self.known.values())
