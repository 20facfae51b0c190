"""A test that cannot fail is worse than none: each planted bug turns the random load red, for the reason given."""

from __future__ import annotations

import pytest
import torch

from stateful import soak
from tidekv.allocator import DynamicPagedTokenToKVPoolAllocator
from tidekv.geometry import KVGeometry
from tidekv.kernels import move, remap
from tidekv.memory.ledger import Ledger
from tidekv.memory.loc_holders import LocHolders
from tidekv.pressure import repack

FAULTS = (AssertionError, RuntimeError, ValueError, IndexError)


def goes_red(capsys: pytest.CaptureFixture[str], match: str) -> None:
    """The soak fails for this reason, and says how to repeat it."""
    with pytest.raises(FAULTS, match=match):
        soak.soak(seed=1, operations=4000)
    assert "--seed 1 --run" in capsys.readouterr().err


def test_the_same_load_is_green_without_a_bug():
    assert soak.soak(seed=1, operations=1200).operations == 1200


def test_wrong_compaction_order(monkeypatch, capsys):
    """Cells copied from the last to the first: a cell is overwritten before it is read."""

    def compact_descending(k, v, combined, factor, new_width, page_stride, page_size):
        for flat in (k, v):
            pages = flat.view(-1, page_size, *flat.shape[1:])
            for j in reversed(range(new_width)):
                pages[combined + j * page_stride] = pages[combined + j * factor.long() * page_stride]

    monkeypatch.setattr(move, "compact_cells", compact_descending)
    assert repack.kernels is move
    goes_red(capsys, "wrong bits")


def test_lookup_table_not_applied_to_a_holder(monkeypatch, capsys):
    def only_rows(self, lookup):
        pool, table = self.req_to_token_pool, torch.from_numpy(lookup)
        if len(pool.live_rows()):
            rows = torch.from_numpy(pool.live_rows())
            remap.remap_rows_(pool.req_to_token, rows, pool.written_width(), table, self.page_size)

    monkeypatch.setattr(LocHolders, "remap", only_rows)
    goes_red(capsys, "registered holder names slot")


def test_lookup_table_not_applied_to_last_loc(monkeypatch, capsys):
    monkeypatch.setattr(LocHolders, "remapped", lambda self, locs, lookup: locs)
    goes_red(capsys, "spans two slots")


def test_lookup_table_not_applied_to_collected_frees(monkeypatch, capsys):
    monkeypatch.setattr(
        DynamicPagedTokenToKVPoolAllocator, "_remap_loc_holders", lambda self, lookup: self.loc_holders.remap(lookup)
    )
    goes_red(capsys, "twice in the free list|leaked or is gone")


def test_host_page_freed_early(monkeypatch, capsys):
    """A slot gives its host page back when a neighbour in its page goes. The checker is off: the read-back sees it."""
    release = Ledger.release

    def release_too_much(self, combined):
        pages = set((combined % self.page_stride).tolist())
        release(self, combined)
        for slot in self.occupied.nonzero()[0].tolist():
            if slot % self.page_stride in pages and self.host_plus_1[slot]:
                self.host_free = repack.np.append(self.host_free, self.host_plus_1[slot] - 1)

    monkeypatch.setattr(Ledger, "release", release_too_much)
    monkeypatch.setattr(Ledger, "check", lambda self: None)
    goes_red(capsys, "wrong bits")


def test_donor_not_freed(monkeypatch, capsys):
    move_slots = Ledger.move

    def move_and_keep_donors(self, src, dst):
        self._free_pages = lambda pages: None
        move_slots(self, src, dst)
        del self._free_pages

    monkeypatch.setattr(Ledger, "move", move_and_keep_donors)
    goes_red(capsys, "staging pages wanted|empty page is still owned")


def test_off_by_one_resident_layer(monkeypatch, capsys):
    """Consistent inside (read_kv agrees with it): only the independent layout knows that layer 0 stays."""
    right = KVGeometry.resident_layers

    def shifted(self, width):
        layers = right(self, width)
        return layers if width == self.layer_num else tuple(x + 1 for x in layers)

    monkeypatch.setattr(KVGeometry, "resident_layers", shifted)
    goes_red(capsys, "wrong bits")


def test_a_refusal_that_leaves_something_behind(monkeypatch, capsys):
    monkeypatch.setattr(DynamicPagedTokenToKVPoolAllocator, "_roll_back", lambda self, decision: None)
    goes_red(capsys, "a refusal changed")


def test_stale_write_through(monkeypatch, capsys):
    """Slots say that the host has every layer when it has only those that left."""
    give = Ledger.give_host_pages

    def give_and_say_backed(self, combined):
        give(self, combined)
        self.backed[combined] = True

    monkeypatch.setattr(Ledger, "give_host_pages", give_and_say_backed)
    goes_red(capsys, "wrong bits|stale")


def test_a_pair_of_staging_cells_given_twice(monkeypatch, capsys):
    assign = Ledger.assign_dynamic

    def assign_first_to_all(self, combined):
        done = assign(self, combined)
        self.dynamic_of[combined] = self.dynamic_of[combined[:1]]
        return done

    monkeypatch.setattr(Ledger, "assign_dynamic", assign_first_to_all)
    monkeypatch.setattr(Ledger, "check", lambda self: None)
    goes_red(capsys, "one dynamic slot each")
