"""Which of a request's pages a layer reads when it is not resident in them. A property of a class of requests.

    exact    every page: what is narrow is streamed from the host at each step that reads it. Lossless
    window   LOSSY: the first page and the most recent tokens stay at full width; layers that are not resident do not
             see the pages between them, and nothing is streamed

A mode answers three questions, and this is the seam for another one (streaming a few chosen pages, say):

    kept       which pages may never narrow            asked by the scheduler when it looks for pages
    width      how far the others may narrow           likewise
    streamed   of a request's narrow pages those that   asked by the runner for the page tables of layers that are not
               a step brings over the link; layers      resident (`build_batch`) and by a replay for the bytes
               that are not resident skip the others

`exact` and `window` stream all or nothing of a request, so `build_batch` takes one flag a request, `streams_nothing`. A
mode that streams some needs the mask of `streamed` there; `NarrowTables` is made from such a mask already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np

from tidekv.errors import ConfigError
from tidekv.memory.ledger import BoolArray, IntArray

Reads = Literal["exact", "window"]
READS: tuple[str, ...] = get_args(Reads)
WINDOW_LEVEL = 2  # old pages of a window keep L/4 layers: what is measured in docs/fidelity.md, and no fewer


class ReadMode(Protocol):
    """How one class of requests is read. `label` is what every output says; a lossy one has LOSSY in it."""

    @property
    def label(self) -> str:
        """As outputs name it."""

    @property
    def is_lossy(self) -> bool:
        """An answer may differ from that of full width. KV computed from then on is never shared with others."""

    @property
    def streams_nothing(self) -> bool:
        """No page is ever streamed, so a request of this mode is never paused for what it would read."""

    def kept(self) -> tuple[int, int]:
        """(leading, trailing) pages of a request that stay at full width."""

    def width(self, ladder: tuple[int, ...]) -> int:
        """The narrowest width of the pages between them."""

    def streamed(self, slots: IntArray, narrow: BoolArray) -> BoolArray:
        """[N] which of a request's pages a step brings over the link. slots: [N] combined ids in order of tokens;
        narrow: [N] those below full width. Only narrow ones may be chosen."""


@dataclass(frozen=True)
class Exact:
    """Everything is read, whatever it costs."""

    label: str = "exact"
    is_lossy: bool = False
    streams_nothing: bool = False

    def kept(self) -> tuple[int, int]:
        """None has to stay wide."""
        return 0, 0

    def width(self, ladder: tuple[int, ...]) -> int:
        """The narrowest there is."""
        return ladder[-1]

    def streamed(self, slots: IntArray, narrow: BoolArray) -> BoolArray:
        """All that are narrow."""
        return narrow


@dataclass(frozen=True)
class Window:
    """LOSSY. `pages`: pages of the most recent tokens; one more stays wide, because the window rarely ends at a page's
    end."""

    pages: int
    label: str = "window (LOSSY)"
    is_lossy: bool = True
    streams_nothing: bool = True

    def kept(self) -> tuple[int, int]:
        """The first page (attention sinks) and the window."""
        return 1, self.pages + 1

    def width(self, ladder: tuple[int, ...]) -> int:
        """A quarter of the layers."""
        return ladder[min(WINDOW_LEVEL, len(ladder) - 1)]

    def streamed(self, slots: IntArray, narrow: BoolArray) -> BoolArray:
        """None."""
        return np.zeros_like(narrow)


@dataclass(frozen=True)
class ReadModes:
    """One mode a class."""

    high: ReadMode = Exact()
    low: ReadMode = Exact()

    def of(self, is_high_priority: bool) -> ReadMode:
        """The mode of a class."""
        return self.high if is_high_priority else self.low

    @property
    def any_lossy(self) -> bool:
        """Some class is read with loss."""
        return self.high.is_lossy or self.low.is_lossy

    @staticmethod
    def named(high: str, low: str, window_tokens: int, page_size: int) -> ReadModes:
        """By their names; `ConfigError` lists those there are."""
        return ReadModes(
            *(_named(f"{c}_reads", name, window_tokens, page_size) for c, name in (("high", high), ("low", low)))
        )


def _named(option: str, name: str, window_tokens: int, page_size: int) -> ReadMode:
    if name == "exact":
        return Exact()
    if name == "window":
        return Window(-(-window_tokens // page_size))
    raise ConfigError(f"{option} must be one of {', '.join(READS)}, got {name!r}")
