"""The shape of the cache and its arithmetic: encoding, width ladder, resident layers, bytes. Holds no memory.

A page has one *cell* per layer. A *slot* is a run of cells of one page that holds one logical page of tokens; its first
cell is `slot_start` (1-based) and its `slot_width` is the number of its cells, which is the number of its resident
layers.

    combined = page + (slot_start - 1) * (P + 1)          one id per slot, also the flat page of its first cell
    loc      = combined * page_size + offset              what `req_to_token` holds; also the flat row of its first cell
    row of the slot's j-th resident layer = loc + j * pool_stride,  pool_stride = (P + 1) * page_size

Example (L = 8, P = 10, page_size = 4): page 3, slot_start 5, offset 2 -> combined 3 + 4*11 = 47 -> loc 190.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tidekv.errors import ConfigError

MIN_SLOT_WIDTH = 2
INT64_MAX = 2**63 - 1

# An int, a numpy array or a torch tensor of ids: the encoding is plain arithmetic and works on each.
Ids = TypeVar("Ids", int, npt.NDArray[np.int64], torch.Tensor)


@dataclass(frozen=True)
class KVGeometry:
    """Layers, pages and heads of one cache. Refuses, with a `ConfigError`, what cannot work.

    layer_num      L, layers of the model (>= 2: with one layer there is nothing to give up)
    num_pages      P, physical pages 1..P; page 0 is the sink for padding and is never handed out
    page_size      tokens a page
    num_kv_heads, head_dim, dtype   of one token's K (and of its V) in one layer
    """

    layer_num: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name, least in (("layer_num", 2), ("num_pages", 1), ("page_size", 1), ("num_kv_heads", 1), ("head_dim", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be an integer >= {least}, got {value!r}")
        if not isinstance(self.dtype, torch.dtype):
            raise ConfigError(f"dtype must be a torch.dtype, got {self.dtype!r}")
        # Rows times heads times head_dim is the largest element offset a kernel forms; it must fit the int64 that we
        # use.
        if self.flat_rows * self.num_kv_heads * self.head_dim > INT64_MAX:
            raise ConfigError(
                f"{self.flat_rows} flat rows of {self.num_kv_heads} x {self.head_dim} elements exceed int64; "
                "lower num_pages"
            )

    # ---- encoding ----------------------------------------------------------------------------------------------

    @property
    def page_stride(self) -> int:
        """P + 1: flat pages from one cell of a page to its next cell."""
        return self.num_pages + 1

    @property
    def pool_stride(self) -> int:
        """(P + 1) * page_size: flat rows from one cell to the next."""
        return self.page_stride * self.page_size

    @property
    def num_combined(self) -> int:
        """Size of the space of combined ids, which is also the number of flat pages: L * (P + 1)."""
        return self.layer_num * self.page_stride

    @property
    def flat_rows(self) -> int:
        """Rows of the flat K (or V) tensor: L * (P + 1) * page_size. Passes 2**31 on real machines (80 layers * 1M
        pages * 64 tokens)."""
        return self.num_combined * self.page_size

    def encode(self, page: Ids, slot_start: Ids | int, offset: Ids | int) -> Ids:
        """(page, slot_start 1-based, offset) -> encoded location. Ints, int64 arrays or int64 tensors alike."""
        return (page + (slot_start - 1) * self.page_stride) * self.page_size + offset

    def decode(self, loc: Ids) -> tuple[Ids, Ids, Ids]:
        """Encoded location -> (page, slot_start 1-based, offset); the inverse of `encode`."""
        combined = loc // self.page_size
        return combined % self.page_stride, combined // self.page_stride + 1, loc % self.page_size

    # ---- width ladder ------------------------------------------------------------------------------------------

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """L, L//2, L//4, ... down to the last width that is >= 2. L = 30 gives (30, 15, 7, 3); L = 3 gives (3,)."""
        return self.ladder(MIN_SLOT_WIDTH)

    def ladder(self, min_slot_width: int) -> tuple[int, ...]:
        """The widths not below `min_slot_width`; `ConfigError` unless 1 <= min_slot_width <= L."""
        if not 1 <= min_slot_width <= self.layer_num:
            raise ConfigError(f"min_slot_width must lie in 1..{self.layer_num} (layer_num), got {min_slot_width}")
        out = [self.layer_num]
        while out[-1] // 2 >= min_slot_width:
            out.append(out[-1] // 2)
        return tuple(out)

    def level_of_width(self, width: int) -> int:
        """Index in the ladder: 0 for L, 1 for L//2, ... `ConfigError` for a width that is not on it."""
        ladder = self.ladder(1)
        if width not in ladder:
            raise ConfigError(f"width {width} is not on the ladder {ladder} of {self.layer_num} layers")
        return ladder.index(width)

    def resident_layers(self, width: int) -> tuple[int, ...]:
        """Layers that a slot of this width keeps: every 2**level-th, cut to `width`. L = 30, width 3: (0, 8, 16)."""
        step = 2 ** self.level_of_width(width)
        return tuple(range(0, width * step, step))

    def slot_starts(self, width: int) -> tuple[int, ...]:
        """1-based first cells of the slots of a page of this width, in order; 2**level of them.

        A slot of width W splits into [s, s + W//2) and [s + W//2, ...); with odd W the last cell stays unused. So L =
        30 gives 1, 16 at width 15 and 1, 8, 16, 23 at width 7, and halving a slot never changes its location.
        """
        starts, w = [1], self.layer_num
        for _ in range(self.level_of_width(width)):
            w //= 2
            starts = [s + d for s in starts for d in (0, w)]
        return tuple(starts)

    # ---- bytes -------------------------------------------------------------------------------------------------

    @property
    def token_bytes_per_layer(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell: page_size tokens of K and V of one layer."""
        return self.page_size * self.token_bytes_per_layer

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: L cells."""
        return self.layer_num * self.cell_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool, the sink page included."""
        return self.page_stride * self.page_bytes

    @staticmethod
    def pages_for_bytes(memory_bytes: int, page_bytes: int) -> int:
        """Pages 1..P that fit in `memory_bytes` beside the sink page; may be < 1 when nothing fits."""
        return memory_bytes // page_bytes - 1


def narrow_slot_table(geometry: KVGeometry, ladder: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """`resident_pos[level, layer]`: which cell of the slot holds the layer (0-based), or -1 when it is on the host.

    Shape [len(ladder), L], int32. Every part that asks "where is layer l of a slot at this level" reads this table.
    """
    table = np.full((len(ladder), geometry.layer_num), -1, dtype=np.int32)
    for level, width in enumerate(ladder):
        table[level, list(geometry.resident_layers(width))] = np.arange(width, dtype=np.int32)
    return table
