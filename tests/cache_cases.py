"""Short hands for the unit tests of the allocator: write, read and extend by numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from oracle import V_BITS, k_bits

HIGH, LOW, DYNAMIC = 1, 2, 3


def write(allocator: Any, locs: torch.Tensor, first_serial: int) -> np.ndarray:
    """K and V of every layer of these tokens; returns their serials."""
    serials = np.arange(first_serial, first_serial + len(locs))
    bits = k_bits(serials, allocator.geometry.layer_num)
    for layer in range(allocator.geometry.layer_num):
        k = torch.from_numpy(bits[:, layer].copy()).view(torch.float32).view(-1, 1, 1)
        v = torch.from_numpy(bits[:, layer] ^ np.int32(V_BITS)).view(torch.float32).view(-1, 1, 1)
        allocator.write_kv(layer, locs, k, v)
    return serials


def assert_reads(allocator: Any, locs: torch.Tensor, serials: np.ndarray) -> None:
    """Every layer of these tokens, bit for bit."""
    bits = k_bits(serials, allocator.geometry.layer_num)
    for layer in range(allocator.geometry.layer_num):
        k, v = allocator.read_kv(layer, locs)
        assert np.array_equal(k.view(torch.int32).numpy().reshape(-1), bits[:, layer]), f"K of layer {layer}"
        assert np.array_equal(v.view(torch.int32).numpy().reshape(-1), bits[:, layer] ^ V_BITS), f"V of layer {layer}"


def page_cells(allocator: Any, page: int) -> list[list[int]]:
    """K bits of the cells of a page: [L][page_size]."""
    g = allocator.geometry
    flat = allocator.kvcache.k_flat.view(torch.int32).reshape(g.layer_num, g.num_pages + 1, g.page_size)
    return flat[:, page].tolist()


def new_request(allocator: Any, tokens: int, high: bool, first_serial: int) -> tuple[int, np.ndarray]:
    """A request of `tokens` written tokens in a row of req_to_token: (row, serials)."""
    (row,) = allocator.req_to_token_pool.alloc(1)
    out, _ = allocator.alloc(tokens, high)
    allocator.req_to_token_pool.write((row, slice(0, tokens)), out)
    return row, write(allocator, out, first_serial)


def row_locs(allocator: Any, row: int, tokens: int) -> torch.Tensor:
    return allocator.req_to_token_pool.req_to_token[row, :tokens]


def extend(allocator: Any, lens: list[tuple[int, int]], last: list[int], priorities: Any = None) -> Any:
    """alloc_extend of [(prefix, seq), ...]."""
    prefix, seq = (torch.tensor([pair[i] for pair in lens]) for i in (0, 1))
    tokens = int((seq - prefix).sum())
    return allocator.alloc_extend(prefix, prefix, seq, seq, torch.tensor(last), tokens, priorities)


def decode(allocator: Any, lens: list[int], last: list[int], priorities: Any = None) -> Any:
    """alloc_decode of requests that have `lens` tokens once the new one is counted in."""
    seq = torch.tensor(lens)
    return allocator.alloc_decode(seq, seq, torch.tensor(last), priorities)
