"""Virtual page ids: the books on their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tidekv.errors import DoubleFreeError, InvariantError
from tidekv.sglang_plugin.virtual_pages import VirtualPages

PAGES, PAGE_SIZE = 8, 4


def made() -> VirtualPages:
    return VirtualPages(20, PAGES, PAGE_SIZE, torch.device("cpu"))


def full(n: int) -> np.ndarray:
    return np.ones(n, dtype=np.bool_)


def test_a_full_width_page_has_its_own_number() -> None:
    pages = made()
    slots = np.array([3, 1, 8])
    assert pages.assign(slots, full(3)).tolist() == [3, 1, 8]
    assert (pages.displaced, pages.num_free) == (0, 17)
    locs = torch.tensor([13, -1, 7], dtype=torch.int32)
    assert pages.locations(locs).tolist() == [13, -1, 7]
    pages.check()


def test_a_narrow_slot_gets_a_spare_id_and_locations_follow_it() -> None:
    pages = made()
    slot = 3 + 15 * (PAGES + 1)  # page 3, second half of 30 layers
    (own, spare) = pages.assign(np.array([3, slot]), np.array([False, False])).tolist()
    assert (own, spare) == (9, 10)
    assert pages.displaced == 2
    assert pages.locations(torch.tensor([4 * 10 + 2, -1])).tolist() == [slot * PAGE_SIZE + 2, -1]
    assert pages.slots_of(np.array([[0, 10], [9, 1]])).tolist() == [[0, slot], [3, 0]]
    pages.check()


def test_ids_up_to_p_are_the_last_to_be_lent() -> None:
    pages = made()
    narrow = np.arange(1, 14) * (PAGES + 1) + 1
    ids = pages.assign(narrow, ~full(13))
    assert sorted(ids[:12].tolist()) == list(range(9, 21))
    assert ids[12] == 8
    assert pages.assign(np.array([8]), full(1)).tolist() != [8]  # taken: page 8 goes by another number
    pages.check()


def test_a_repack_rewrites_the_table_and_nothing_else() -> None:
    pages = made()
    ids = pages.assign(np.array([3, 5]), full(2))
    (table,) = pages.tensors()
    table[5] = 12 * PAGE_SIZE  # what the core does to a holder
    assert ids.tolist() == [3, 5]
    assert pages.displaced == 1
    assert pages.release(ids).tolist() == [3, 12]
    assert (pages.displaced, pages.num_free) == (0, 20)
    pages.check()


def test_a_free_is_checked_before_anything_changes() -> None:
    pages = made()
    ids = pages.assign(np.array([3]), full(1))
    for bad in ([4], [3, 4], [3, 3], [0], [21], [-1]):
        with pytest.raises(DoubleFreeError):
            pages.release(np.array(bad))
    assert pages.num_free == 19
    pages.release(ids)
    with pytest.raises(DoubleFreeError):
        pages.release(ids)


def test_more_than_there_are_is_our_mistake() -> None:
    pages = made()
    with pytest.raises(InvariantError, match="21 virtual pages wanted, 20 free"):
        pages.assign(np.arange(21) + 9, ~full(21))


def test_the_checker_sees_a_planted_fault() -> None:
    pages = made()
    pages.assign(np.array([3, 5]), full(2))
    pages.first_loc[5] = pages.first_loc[3]
    with pytest.raises(InvariantError, match="name one slot"):
        pages.check()
