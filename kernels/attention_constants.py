"""Constants of the attention kernel, in one structure."""

from dataclasses import dataclass
from typing import Any

from kvpage.kernels.arguments import BAD_BLOCK
from kvpage.kernels.attention_plan import MAX_SPLITS
from kvpage.kernels.constants import Constants

SEARCH = 128  # sequences at a time
IDS = 128  # block ids at a time


@dataclass(frozen=True, slots=True)
class AttentionConstants(Constants):
    """One kernel is compiled for each that differs.

    GROUP: query heads of a KV head.
    KEY_RUN, VALUE_RUN: elements of a row that are side by side in the cache.
    QUERY_ALIGN, KEY_ALIGN, VALUE_ALIGN: elements that divide each stride.
    KEY_OFFSET_STRIDE, VALUE_OFFSET_STRIDE: elements from a token's row to the next token's in its block. As constants
        they are parts of instructions, and take no registers.
    STORED, COMPUTE: the cache's type, see kvpage.kernels.attention_rows; the type of the products' operands.
    PRECISION: of products in fp32.
    NORMALIZE: each query by a power of two, where COMPUTE's range is less than the queries'.
    TOKEN_SCALES: scales are of a token's head, not of a head.
    SCALE_VALUES: V is multiplied by them, not the weights: in fp16.
    SHARED: V is the first VALUE_SIZE elements of each key, all within its tile.
    SAME_STRIDES: a row of V is as far from V's beginning as K's from K's.
    KEY_PAIRS, VALUE_PAIRS: 8-bit floats of the cache are loaded two by two, as int16: all of the cache counts pairs.
    WINDOW, SOFTCAP: whether there is one.
    TILE_ROWS, TILE_TOKENS, HEADS: rows of a tile, its tokens, and heads of a token in it.
    TILE_KEYS, KEY_TILE, KEY_TAIL, VALUE_TILE: keys of a tile and its columns, see kvpage.kernels.attention_plan.
    DEPENDENT: the merging kernel is launched before this one ends, and waits for it.
    BOUNDED: the window bounds the keys that a tile of queries reads: its queries follow each other.
    MIN_SPLIT_TILES: tiles of keys that a split has at least.
    MAX_SPLITS: splits that a sequence has at most.
    IDS: block ids that are checked at a time.
    SEARCH: sequences that are searched at a time.
    KEYS: "all" of a sequence, those "shared" by a group of sequences, or the sequence's "own" ones after these; or all
        in "fixed" splits, see kvpage.kernels.attention_fixed.
    SPLIT_TILES: tiles of keys of a fixed split; 0 where splits follow from the lengths.
    BIT: of the error word, for a block id out of range.
    """

    GROUP: int
    KEY_SIZE: int
    VALUE_SIZE: int
    BLOCK_SIZE: int
    KEY_RUN: int
    VALUE_RUN: int
    QUERY_ALIGN: int
    KEY_ALIGN: int
    VALUE_ALIGN: int
    KEY_OFFSET_STRIDE: int
    VALUE_OFFSET_STRIDE: int
    STORED: str
    COMPUTE: Any
    PRECISION: str
    NORMALIZE: bool
    TOKEN_SCALES: bool
    SCALE_VALUES: bool
    SHARED: bool
    SAME_STRIDES: bool
    KEY_PAIRS: bool
    VALUE_PAIRS: bool
    WINDOW: bool
    SOFTCAP: bool
    TILE_ROWS: int
    TILE_TOKENS: int
    HEADS: int
    TILE_KEYS: int
    KEY_TILE: int
    KEY_TAIL: int
    VALUE_TILE: int
    BOUNDED: bool
    MIN_SPLIT_TILES: int
    DEPENDENT: bool
    KEYS: str = "all"
    SPLIT_TILES: int = 0
    MAX_SPLITS: int = MAX_SPLITS
    IDS: int = IDS
    SEARCH: int = SEARCH
    BIT: int = BAD_BLOCK

    @property
    def IS_SHARED(self) -> bool:
        """Whether keys are those of groups of sequences."""
        return self.KEYS == "shared"

    @property
    def IS_OWN(self) -> bool:
        """Whether keys are those after a sequence's groups."""
        return self.KEYS == "own"

    @property
    def IS_FIXED(self) -> bool:
        """Whether splits lie at fixed positions."""
        return self.KEYS == "fixed"

    @property
    def MOST_WHOLE(self) -> int:
        """Splits with which a row is written whole: none where other launches read keys of the row."""
        return 1 if self.KEYS == "all" else 0

    @property
    def SCALE_WEIGHTS(self) -> bool:
        """Whether the weights are multiplied by V's scales."""
        return self.TOKEN_SCALES and not self.SCALE_VALUES

    @property
    def PART_KEYS(self) -> int:
        """Keys of a tile that are in one block for sure."""
        return min(self.TILE_KEYS, self.BLOCK_SIZE)

    @property
    def HAS_FEW_BLOCKS(self) -> bool:
        """Whether each block has a whole number of a tile's parts, and a tile has one, two or four."""
        is_whole = max(self.TILE_KEYS, self.BLOCK_SIZE) % self.PART_KEYS == 0
        return is_whole and self.TILE_KEYS // self.PART_KEYS in (1, 2, 4)

    @property
    def HAS_PARTS(self) -> bool:
        """Whether a tile has two or four parts, each in one block."""
        return self.HAS_FEW_BLOCKS and self.PART_KEYS < self.TILE_KEYS

    @property
    def HAS_EDGES(self) -> bool:
        """Whether a tile of keys may be seen by some rows only. A tile of one token reads the keys that it sees.

        Shared keys come before all rows that share them.
        """
        return self.TILE_TOKENS > 1 and (self.WINDOW or not self.IS_SHARED)

    @property
    def NUM_PHASES(self) -> int:
        """Full tiles of keys, then edges."""
        return 2 if self.HAS_EDGES else 1
