"""Narrowing and widening slots that the caller chose. Catches KV that changes, books that are off, and a refusal that
leaves something behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tidekv import DeviceKVPool, DynamicPagedTokenToKVPoolAllocator, HostKVPool, KVGeometry, ReqToTokenPool

PAGE_SIZE = 4


def make(
    layer_num: int, pages: int, host_pages: int, write_through: bool = False
) -> DynamicPagedTokenToKVPoolAllocator:
    geometry = KVGeometry(layer_num, pages, PAGE_SIZE, 1, 2, torch.float32)
    return DynamicPagedTokenToKVPoolAllocator(
        pages * PAGE_SIZE,
        PAGE_SIZE,
        torch.float32,
        "cpu",
        DeviceKVPool(geometry, "cpu"),
        req_to_token_pool=ReqToTokenPool(4, 64, "cpu"),
        host_pool=HostKVPool(geometry, host_pages * geometry.page_bytes),
        write_through=write_through,
    )


def fill(allocator: DynamicPagedTokenToKVPoolAllocator, tokens: int, is_high: bool, row: int) -> torch.Tensor:
    """`tokens` new tokens in a row of req_to_token, each with its own K and V in every layer; returns those values."""
    found = allocator.alloc(tokens, is_high)
    assert found is not None
    pool = allocator.req_to_token_pool
    assert pool is not None
    pool.write((row, slice(0, tokens)), found[0])
    values = torch.randn(allocator.geometry.layer_num, tokens, 1, 2, generator=torch.Generator().manual_seed(row))
    for layer in range(allocator.geometry.layer_num):
        allocator.write_kv(layer, found[0], values[layer], -values[layer])
    return values


def slots_of(allocator: DynamicPagedTokenToKVPoolAllocator, row: int, tokens: int) -> np.ndarray:
    assert allocator.req_to_token_pool is not None
    return allocator.req_to_token_pool.req_to_token[row, :tokens:PAGE_SIZE].numpy().astype(np.int64) // PAGE_SIZE


def assert_reads_back(allocator: DynamicPagedTokenToKVPoolAllocator, row: int, values: torch.Tensor) -> None:
    assert allocator.req_to_token_pool is not None
    locs = allocator.req_to_token_pool.req_to_token[row, : values.shape[1]]
    for layer in range(values.shape[0]):
        k, v = allocator.read_kv(layer, locs)
        assert torch.equal(k, values[layer])
        assert torch.equal(v, -values[layer])


@pytest.mark.parametrize("layer_num", [5, 8, 16])
@pytest.mark.parametrize("write_through", [False, True])
def test_chosen_slots_narrow_and_widen_bit_for_bit(layer_num: int, write_through: bool) -> None:
    allocator = make(layer_num, 24, 200, write_through)
    pool = allocator.req_to_token_pool
    assert pool is not None
    pool.alloc(3)
    written = [fill(allocator, 28, False, 0), fill(allocator, 20, False, 1), fill(allocator, 16, True, 2)]
    lowest = allocator.ledger.ladder[-1]
    assert allocator.narrow_slots(slots_of(allocator, 0, 28)[1:5], lowest) == 4
    allocator.check()
    assert allocator.narrow_slots(slots_of(allocator, 0, 28), lowest) == 3  # the others were narrow already
    assert allocator.narrow_slots(slots_of(allocator, 2, 16)[:2], allocator.ledger.ladder[1]) == 2
    allocator.check()
    assert allocator.low_current_slot_width == layer_num  # new slots stay wide
    for row, values in enumerate(written):
        assert_reads_back(allocator, row, values)
    free = allocator.num_free_pages
    assert allocator.widen_slots(slots_of(allocator, 0, 28)) == min(7, free)
    allocator.check()
    for row, values in enumerate(written):
        assert_reads_back(allocator, row, values)


def test_a_refusal_changes_nothing() -> None:
    allocator = make(8, 8, 2)
    assert allocator.req_to_token_pool is not None
    allocator.req_to_token_pool.alloc(1)
    values = fill(allocator, 16, False, 0)
    before = allocator.req_to_token_pool.req_to_token.clone()
    assert allocator.narrow_slots(slots_of(allocator, 0, 16), 2) == 0  # four host pages wanted, two there
    assert "host pages" in allocator.refusals[-1]
    assert torch.equal(before, allocator.req_to_token_pool.req_to_token)
    assert not allocator.ledger.any_narrow
    assert allocator.widen_slots(slots_of(allocator, 0, 16)) == 0  # nothing to widen
    allocator.check()
    assert_reads_back(allocator, 0, values)
