"""Step: the sequences that one forward pass computes, packed into one row, as attention needs them.

    input_ids    [ a17 | b5 | c0 c1 c2 c3 c4 | d8 d9 ]     4 sequences, 9 tokens
    query_lens   [ 1     1    5                2      ]     tokens of each in this step
    seq_lens     [ 18    6    5                10     ]     tokens of each in the cache after it

It is made once a step and read by every layer.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blend.segments import Reuse
from kvpage.blocks.rows import StepInputs
from kvpage.cache.cache_engine import CacheEngine
from kvpage.layout.attention import Attention
from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.shared_prefixes import PlanRow
from kvpage.ops import BoundCache, Sequences, attends_in_place
from kvpage.ops.args.sequences import num_decodes
from kvpage.ops.args.tokens import COMPUTE_DTYPES
from kvpage.ops.cuda.attention import takes_plans
from kvpage.ops.cuda.uploads import upload
from kvpage.ops.shared_prefixes import plan_into
from kvpage.serving.model.native.torch_threads import TorchThreads

Positions = Sequence[int] | npt.NDArray[np.int64]
"""A position in each of several sequences."""


_NO_LAYOUT = CacheLayout(1, 1, 1, torch.float32)
"""The layout of a step in which no layer attends. Nothing is of this layout."""


class PackedTokens(NamedTuple):
    """Tokens of several sequences, one sequence after the other.

    token_ids: int32 [num_tokens], the positions [starts[i], ends[i]) of each sequence.
    wanted: int64, the indices in token_ids whose logits are returned.
    is_decode: whether each sequence has one token, and all are wanted; starts is an int64 array then.
    """

    token_ids: npt.NDArray[np.int32]
    starts: Positions
    ends: Positions
    wanted: npt.NDArray[np.int64]
    is_decode: bool = False

    def positions(self) -> npt.NDArray[np.int64]:
        """Return the position of each token in its own sequence, int64."""
        if self.is_decode and isinstance(self.starts, np.ndarray):
            return self.starts
        starts, ends = np.asarray(self.starts, np.int64), np.asarray(self.ends, np.int64)
        counts = ends - starts
        if (counts == 1).all():
            return starts
        rows_before = np.cumsum(counts) - counts
        positions: npt.NDArray[np.int64] = np.arange(len(self.token_ids)) + np.repeat(starts - rows_before, counts)
        return positions

    def arrays(self) -> list[npt.NDArray[np.int64]]:
        """Return token ids and positions, [1, num_tokens] as models take them, and `wanted` where not all are."""
        both = [self.token_ids[None].astype(np.int64), self.positions()[None]]
        return both if self.is_decode else [*both, self.wanted]


class ModelInputs(NamedTuple):
    """The arguments of a model, on its device.

    token_ids, positions: int64 [1, num_tokens]. wanted: int64, the rows whose logits are returned; None for all.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor | None = None

    @classmethod
    def of(cls, packed: PackedTokens, device: torch.device) -> "ModelInputs":
        """Return the inputs for these tokens, in one copy to the device."""
        return cls(*upload(packed.arrays(), device))


class BatchItem(NamedTuple):
    """The positions [start, end) of one sequence, to be computed in one forward pass.

    seq_id: the sequence's id in the block manager. token_ids: int32 [end - start].
    wanted: indices into token_ids. Logits are computed for these tokens.
    reuse: segments whose K and V take the place of computed ones.
    """

    seq_id: Hashable
    token_ids: npt.NDArray[np.int32]
    start: int
    end: int
    wanted: Sequence[int]
    reuse: Sequence[Reuse] = ()


class StepBlend(Protocol):
    """The work of a step some of whose tokens have K and V already."""

    def hooks(self) -> AbstractContextManager[object]:
        """Let the model's layers, inside, go on with the chosen rows."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, attention: Attention
    ) -> torch.Tensor:
        """Write K and V of a layer's rows, and attend over the blocks: [rows, heads, value size]."""


class StepArrival(Protocol):
    """Blocks that are on their way to the device, or from it, while the step computes."""

    def wait_layer(self, layer: int) -> None:
        """Order the current stream's further work after the moves of a layer. Raise their error."""


class StepLatents(Protocol):
    """The work of a step whose blocks hold latents instead of heads' K and V."""

    def listening(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """Keep for `attend`, inside, the latents that the model's layers make."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        attention: Attention,
    ) -> torch.Tensor:
        """Write the latents of a layer's rows, and attend over the blocks: [rows, heads, value size]."""


class StepStates(Protocol):
    """The states of a step whose model has mixers, such as Mamba's."""

    def check(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> None:
        """Raise ValueError unless the states are for a step with these lengths."""

    def compute(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the packed row that a mixer was called with, and return what the mixer gives."""

    def check_done(self) -> None:
        """Raise ValueError if a state was not computed."""


@dataclass(slots=True)
class Step:
    """One forward pass over `caches`, one cache by layer_idx, all of one dtype. Where no layer attends there are none.

    slot_mapping: int64 [num_tokens]; block_tables: int32 [num_seqs, max_blocks]; both on the caches' device.
    device_query_lens, device_seq_lens: int64 [num_seqs] there too, the former None where each sequence has one query;
        query_lens, seq_lens: the same as plain integers.
    calls: (layer_idx, sliding window) of each call of the attention function so far.
    query_positions: int64 [num_tokens] on the CPU: the position of each row in its sequence, ascending; None for the
        last ones. device_query_positions: the same on the caches' device.
    blend: the work on tokens that have K and V already; None where there are none.
    inputs: the model's arguments, where these came to the device with the step's own; else None.
    arrival: the moves under way, for which each layer waits before it touches a block; None where there are none.
    latents: the work on latents; None where blocks hold heads' K and V, and outside of a forward pass.
    states: the work on states; None where the model has none.
    windows: by layer_idx, the same step over the blocks of a window's group; empty where all layers share one table.
    sharing: layers that attend over the K and V of another, which writes them; `caches` has that one's for them.
    layout: of the first cache.
    threads: the limit of torch's threads in the forward pass, which attention lifts; None where there is none.
    written: called with each layer once its K and V are written; None if nobody wants to know.
    sequences: block tables and lengths, made once for all layers.
    attends_in_place: whether ops.attend reads these blocks. On a CPU it is as fast as gathering and SDPA, even for
        whole prompts.
    takes_all_rows: whether it attends in place and its rows are the last ones of each sequence.
    """

    caches: dict[int, BoundCache]
    layout: CacheLayout
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    device_query_lens: torch.Tensor | None
    device_seq_lens: torch.Tensor
    query_lens: list[int]
    seq_lens: list[int]
    sequences: Sequences
    calls: list[tuple[int, int | None]] = field(default_factory=list)
    query_positions: torch.Tensor | None = None
    device_query_positions: torch.Tensor | None = None
    blend: StepBlend | None = None
    inputs: ModelInputs | None = None
    arrival: StepArrival | None = None
    latents: StepLatents | None = None
    states: StepStates | None = None
    windows: dict[int, "Step"] = field(default_factory=dict)
    sharing: frozenset[int] = frozenset()
    threads: TorchThreads | None = None
    written: Callable[[int], object] | None = None
    attends_in_place: bool = field(init=False)
    takes_all_rows: bool = field(init=False)

    def __post_init__(self) -> None:
        knows_cache = self.layout.dtype in COMPUTE_DTYPES or self.layout.is_quantized
        self.attends_in_place = knows_cache and attends_in_place(self.slot_mapping.device)
        self.takes_all_rows = self.attends_in_place and self.query_positions is None

    @classmethod
    def make(
        cls,
        engine: CacheEngine,
        slot_mapping: npt.NDArray[np.int64],
        block_tables: npt.NDArray[np.int32],
        starts: Positions,
        ends: Positions,
        packed: PackedTokens | None = None,
    ) -> "Step":
        """Return a step that computes the positions [starts[i], ends[i]) of each sequence.

        packed: its tokens, which go to a device with the step's own numbers, in one copy; None to leave them.
        """
        seq_lens = np.asarray(ends, np.int64)
        query_lens = seq_lens - np.asarray(starts, np.int64)
        is_decode = bool((query_lens == 1).all())
        inputs = StepInputs(slot_mapping, block_tables, seq_lens)
        return cls._of_arrays(engine, inputs, None if is_decode else query_lens, packed)

    @classmethod
    def of_newest(cls, engine: CacheEngine, inputs: StepInputs, packed: PackedTokens | None = None) -> "Step":
        """Return a step that computes the last token of each sequence. packed: as of `make`."""
        return cls._of_arrays(engine, inputs, None, packed)

    @classmethod
    def of_static(
        cls,
        engine: CacheEngine,
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
        device_seq_lens: torch.Tensor,
        max_seq_len: int,
        shared: torch.Tensor | None = None,
    ) -> "Step":
        """Return a step of one query a sequence, whose tensors may change each time that it is computed.

        The arguments are those of `Step`, and a plan of ops.shared_prefixes or None, all on the caches' device. Lengths
        are 0, of padding, to max_seq_len. On a CPU operations know lengths as integers. They are read now, and padding
        attends to one token there.
        """
        num_seqs, on_host = len(slot_mapping), engine.device.type == "cpu"
        lengths: list[int] = device_seq_lens.clamp(min=1).tolist() if on_host else [max_seq_len] * num_seqs
        queries, caches, layout = [1] * num_seqs, engine.bound_layers, _layout(engine)
        sequences = _sequences(caches, block_tables, device_seq_lens, None, queries, lengths, shared)
        tensors = slot_mapping, block_tables, None, device_seq_lens
        return cls(caches, layout, *tensors, queries, lengths, sequences, sharing=frozenset(engine.shared_layers))

    @classmethod
    def _of_arrays(
        cls,
        engine: CacheEngine,
        inputs: StepInputs,
        query_lens: npt.NDArray[np.int64] | None,
        packed: PackedTokens | None,
    ) -> "Step":
        """Return a step; query_lens: None for one each."""
        device, caches = engine.device, engine.bound_layers
        lengths: list[int] = inputs.seq_lens.tolist()
        queries: list[int] = [1] * len(lengths) if query_lens is None else query_lens.tolist()
        arrays: list[npt.NDArray[Any]] = [inputs.slots, inputs.block_tables, inputs.seq_lens]
        if query_lens is not None:
            arrays.append(query_lens)
        plan = _plan(engine, inputs, queries)
        if plan is not None:
            arrays.append(plan)
        sent = packed.arrays() if packed is not None and device.type != "cpu" else []
        slots, tables, device_lens, *others = upload([*arrays, *sent], device)
        device_queries = None if query_lens is None else others.pop(0)
        shared = None if plan is None else others.pop(0)
        sequences = _sequences(caches, tables, device_lens, device_queries, queries, lengths, shared)
        layout = _layout(engine)
        tensors, sharing = (slots, tables, device_queries, device_lens), frozenset(engine.shared_layers)
        step = cls(caches, layout, *tensors, queries, lengths, sequences, sharing=sharing)
        if sent:
            step.inputs = ModelInputs(*others)
        return step

    def expect(self, arrival: StepArrival | None) -> None:
        """Let each layer wait for these moves before it touches a block; None if there are none."""
        self.arrival = arrival

    def next_layer(self) -> int | None:
        """Return the layer that attends next, for a module that several layers share; None after the last one."""
        return next((layer for layer in self.caches if layer not in {called for called, _ in self.calls}), None)

    def use_states(self, states: StepStates | None) -> None:
        """Let the model's mixers compute with these states; None if it has none."""
        self.states = states

    def use_window(self, group: "Step") -> None:
        """Let the layers of a window's group write and attend as this step of the same tokens says."""
        self.caches, self.sharing = {**self.caches, **group.caches}, self.sharing | group.sharing
        self.windows.update(dict.fromkeys(group.caches, group))

    def lift(self, threads: TorchThreads | None) -> None:
        """Let attention lift this limit of torch's threads."""
        self.threads = threads

    def tell(self, written: Callable[[int], object] | None) -> None:
        """Have this called with each layer once its K and V are written; None for nobody."""
        self.written = written

    def of_rows(self, rows: torch.Tensor) -> "Step":
        """Return the step for some of its rows only: int64, ascending, one of each sequence at least."""
        at = rows.cpu().numpy()
        bounds = np.cumsum([0, *self.query_lens])
        counts = np.diff(np.searchsorted(at, bounds)).tolist()
        starts = [length - count for length, count in zip(self.seq_lens, self.query_lens, strict=True)]
        positions = torch.from_numpy(at + np.repeat(np.array(starts) - bounds[:-1], counts))
        device_lens, device_positions = upload([np.array(counts, np.int64), positions.numpy()], rows.device)
        return replace(
            self,
            slot_mapping=self.slot_mapping[rows],
            device_query_lens=device_lens,
            query_lens=counts,
            sequences=_sequences(
                self.caches, self.block_tables, self.device_seq_lens, device_lens, counts, self.seq_lens
            ),
            query_positions=positions,
            device_query_positions=device_positions,
            blend=None,
        )

    def of_sequences(self, indices: Sequence[int]) -> "Step":
        """Return the step for some of its sequences only. It leaves their slots out: everything is written."""
        (at,) = upload([np.array(indices, np.int64)], self.block_tables.device)
        query_lens = [self.query_lens[index] for index in indices]
        seq_lens = [self.seq_lens[index] for index in indices]
        tables, device_lens = self.block_tables[at], self.device_seq_lens[at]
        is_decode = all(count == 1 for count in query_lens)
        device_queries = None if self.device_query_lens is None or is_decode else self.device_query_lens[at]
        return replace(
            self,
            block_tables=tables,
            device_query_lens=device_queries,
            device_seq_lens=device_lens,
            query_lens=query_lens,
            seq_lens=seq_lens,
            sequences=_sequences(self.caches, tables, device_lens, device_queries, query_lens, seq_lens),
        )


def _layout(engine: CacheEngine) -> CacheLayout:
    return engine.layout if engine.layer_ids else _NO_LAYOUT


@functools.cache
def _no_cache(device: torch.device) -> BoundCache:
    """Return an empty cache, for the lengths of a step in which no layer attends."""
    (empty,) = _NO_LAYOUT.allocate(0, 1, device)
    return BoundCache(empty, _NO_LAYOUT)


def _plan(engine: CacheEngine, inputs: StepInputs, query_lens: list[int]) -> npt.NDArray[np.int64] | None:
    """Return a plan for the first sequences, which have one query each; None where no keys are to be shared."""
    cache = next(iter(engine.bound_layers.values()), None)
    if cache is None or not takes_plans(cache) or (num_planned := num_decodes(query_lens)) < 2:
        return None
    plan = np.empty((len(PlanRow), num_planned), np.int64)
    tables = np.ascontiguousarray(inputs.block_tables[:num_planned])
    return plan if plan_into(plan, tables, inputs.seq_lens, cache.layout.block_size) else None


def _sequences(
    caches: dict[int, BoundCache],
    block_tables: torch.Tensor,
    device_seq_lens: torch.Tensor,
    device_query_lens: torch.Tensor | None,
    query_lens: list[int],
    seq_lens: list[int],
    shared: torch.Tensor | None = None,
) -> Sequences:
    """Return block tables and lengths as the operations take them: lengths on the device of the caches."""
    cache = next(iter(caches.values()), None) or _no_cache(block_tables.device)
    is_decode = device_query_lens is None
    longest = 1 if is_decode else max(query_lens), max(seq_lens)
    num_tokens = len(query_lens) if is_decode else sum(query_lens)
    if cache.is_cuda:
        return Sequences.of_step(
            cache,
            num_tokens,
            block_tables,
            device_seq_lens,
            device_query_lens,
            *longest,
            num_decodes(query_lens),
            host_lengths=(seq_lens, query_lens),
            shared=shared,
        )
    return Sequences.of_step(cache, num_tokens, block_tables, seq_lens, query_lens, *longest)
