"""What callers must hand to the allocator. Every check runs before anything changes and names the value it refuses."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from tidekv.errors import ConfigError, DoubleFreeError
from tidekv.memory.ledger import HIGH, LOW, BoolArray, CodeArray, IntArray, Ledger

# None: all high. A bool: all of that. A list or a bool tensor [bs]: one for each request.
Priorities = bool | Iterable[bool] | torch.Tensor | None
_CODE_OF_BOOL = np.array([LOW, HIGH], dtype=np.int8)  # as in the books: 8,192 pages are then booked by a memcpy


def check_device_vector(name: str, tensor: torch.Tensor, length: int, device: torch.device) -> None:
    """[length] int64 on `device`, else `ConfigError`."""
    if (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype is torch.int64
        and tensor.dim() == 1
        and tensor.numel() == length
        and (tensor.is_cuda if device.type == "cuda" else tensor.is_cpu)
        and tensor.is_contiguous()
    ):
        return
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype != torch.int64:
        raise ConfigError(f"{name} must be int64, got {tensor.dtype}")
    if tensor.shape != (length,):
        raise ConfigError(f"{name} must have shape ({length},), got {tuple(tensor.shape)}")
    if tensor.device.type != device.type:
        raise ConfigError(f"{name} must be on {device}, got {tensor.device}")
    raise ConfigError(f"{name} must be contiguous, got strides {tensor.stride()}")


def host_lens(name: str, tensor: torch.Tensor) -> IntArray:
    """A CPU length tensor as a numpy view: [bs] int64."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cpu or tensor.dim() != 1:
        raise ConfigError(f"{name} must be a 1-d tensor on the CPU, got {_describe(tensor)}")
    if tensor.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"{name} must be int64, got {tensor.dtype}")
    lens: npt.NDArray[np.int64] = tensor.numpy()
    return lens


def check_extend(prefix_lens: IntArray, seq_lens: IntArray, extend_num_tokens: int) -> None:
    """0 <= prefix <= seq for each request, and `extend_num_tokens` is their difference summed."""
    if len(prefix_lens) != len(seq_lens):
        raise ConfigError(f"prefix_lens has {len(prefix_lens)} requests but seq_lens has {len(seq_lens)}")
    extend_lens = seq_lens - prefix_lens
    if len(seq_lens) and np.minimum(prefix_lens, extend_lens).min() < 0:
        i = int(np.flatnonzero((prefix_lens < 0) | (extend_lens < 0))[0])
        raise ConfigError(f"request {i}: need 0 <= prefix_len <= seq_len, got {prefix_lens[i]} and {seq_lens[i]}")
    tokens = int(np.add.reduce(extend_lens))
    if tokens != extend_num_tokens:
        raise ConfigError(
            f"extend_num_tokens must be {tokens}, the sum of seq_lens - prefix_lens, got {extend_num_tokens}"
        )


def uniform_code(is_high_priority: Priorities) -> int | None:
    """HIGH or LOW if one value stands for the whole batch; None if it names each request."""
    if is_high_priority is None or isinstance(is_high_priority, bool):
        return LOW if is_high_priority is False else HIGH
    return None


def priority_mask(is_high_priority: Priorities, bs: int) -> BoolArray:
    """Priorities of a batch, one for each request, as [bs] bool on the host. A device tensor is waited for."""
    if is_high_priority is None or isinstance(is_high_priority, bool):
        return np.full(bs, is_high_priority is not False)
    if isinstance(is_high_priority, torch.Tensor):
        if is_high_priority.dtype != torch.bool:
            raise ConfigError(f"is_high_priority must be a bool tensor, got {is_high_priority.dtype}")
        mask: BoolArray = is_high_priority.cpu().numpy()
    else:
        mask = np.fromiter(is_high_priority, dtype=np.bool_)
    if mask.shape != (bs,):
        raise ConfigError(f"is_high_priority must have one entry for each of {bs} requests, got shape {mask.shape}")
    return mask


def codes_of_new_pages(
    is_high_priority: Priorities, new_pages: IntArray | BoolArray, num_pages: int
) -> int | list[int] | CodeArray:
    """HIGH or LOW for all `num_pages` pages that a batch opens, or for each: request after request, [num_pages].

    new_pages: [bs] how many each request opens.
    """
    code = uniform_code(is_high_priority)
    if code is not None:
        return code
    bs, at_most_one = len(new_pages), new_pages.dtype == np.bool_
    # A step of decodes opens few pages, and turning a list of 1,024 into an array takes as long as the launch.
    if at_most_one and 4 * num_pages < bs and isinstance(is_high_priority, list) and len(is_high_priority) == bs:
        return [HIGH if is_high_priority[i] else LOW for i in new_pages.nonzero()[0].tolist()]
    codes: CodeArray = _CODE_OF_BOOL[priority_mask(is_high_priority, bs).view(np.int8)]  # of each request
    return codes[new_pages] if at_most_one else codes.repeat(new_pages)


def check_last_loc(
    ledger: Ledger,
    last_loc: torch.Tensor,
    prefix_lens: IntArray,
    extends: BoolArray,
    last_slots: IntArray | None = None,
) -> None:
    """`(last_loc + 1) % page_size == prefix_len % page_size`, and a page that goes on is one that is handed out, and
    the one that `last_slots` names.

    Reads `last_loc`, so callers run it where that costs no wait: on the CPU.
    """
    page_size = ledger.geometry.page_size
    last = last_loc.numpy()
    wrong = extends & ((last + 1) % page_size != prefix_lens % page_size)
    goes_on = extends & (prefix_lens % page_size != 0)
    wrong |= goes_on & ~ledger.is_slot(last // page_size)
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise ConfigError(
            f"request {i}: last_loc {last[i]} does not fit prefix_len {prefix_lens[i]} (page_size {page_size}): "
            "(last_loc + 1) % page_size must equal prefix_len % page_size, in a page that is handed out"
        )
    if last_slots is not None and (wrong := goes_on & (last // page_size != last_slots)).any():
        i = int(np.flatnonzero(wrong)[0])
        raise ConfigError(f"request {i}: last_slots has {last_slots[i]}, last_loc lies in slot {last[i] // page_size}")


def check_locs(name: str, locs: torch.Tensor) -> None:
    """Locations of any shape, int64 or int32; a float that looks like one would be cut to a wrong slot."""
    if not isinstance(locs, torch.Tensor) or locs.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"{name} must be an int64 or int32 tensor of locations, got {_describe(locs)}")


def check_parked(ledger: Ledger, host_pages: IntArray) -> None:
    """Host pages that `park` gave, each once, not yet unparked or dropped; else `DoubleFreeError`."""
    inside = (host_pages >= 0) & (host_pages < ledger.num_host_pages)
    bad = (
        host_pages[~inside | ~ledger.host_parked[np.where(inside, host_pages, 0)]]
        if ledger.num_host_pages
        else host_pages
    )
    if len(bad) or len(np.unique(host_pages)) != len(host_pages):
        raise DoubleFreeError(f"host pages {(bad if len(bad) else host_pages)[:8].tolist()} are not parked (each once)")


def slots_to_free(ledger: Ledger, locs: IntArray, already: IntArray) -> IntArray:
    """The slots that these locations free, each once. `DoubleFreeError` for what is not handed out, or is in
    `already`."""
    page_size = ledger.geometry.page_size
    plain = _slots_of_runs(ledger, locs, page_size) if len(locs) and not len(already) else None
    if plain is not None:
        return plain
    if len(np.unique(locs)) != len(locs):
        values, counts = np.unique(locs, return_counts=True)
        raise DoubleFreeError(f"locations {values[counts > 1][:8].tolist()} are freed twice in one call")
    combined = np.unique(locs // page_size)
    bad = combined[~ledger.is_slot(combined)]
    if len(bad):
        first = int(bad[0])
        page, stride = first % ledger.page_stride, ledger.page_stride
        why = (
            f"out of range: locations lie in 0..{ledger.geometry.flat_rows - 1}"
            if not 0 <= first < ledger.geometry.num_combined
            else "page 0 is the sink and is never handed out"
            if page == 0
            else "not handed out: freed before, or never allocated"
        )
        raise DoubleFreeError(
            f"cannot free location {first * page_size} (page {page}, slot_start {first // stride + 1}): {why}"
        )
    again = combined[np.isin(combined, already)]
    if len(again):
        raise DoubleFreeError(f"location {int(again[0]) * page_size} is freed twice in one free group")
    return combined


def _slots_of_runs(ledger: Ledger, locs: IntArray, page_size: int) -> IntArray | None:
    """The slots, if the locations are what a request holds: ascending within each slot, one slot after the other, all
    handed out. None: look closer. A sort of 2,048 locations takes 5 times as long as this."""
    power = page_size & (page_size - 1) == 0
    combined = locs >> (page_size.bit_length() - 1) if power else locs // page_size
    head = np.empty(len(locs), dtype=np.bool_)
    head[0] = True
    np.not_equal(combined[1:], combined[:-1], out=head[1:])
    if not (head[1:] | (locs[1:] > locs[:-1])).all():
        return None
    slots = combined[head]
    if not ledger.is_slot(slots).all() or len(np.unique(slots)) != len(slots):
        return None
    return slots


def budget_pages(name: str, value: int | float | None, default: int, num_pages: int) -> int:
    """A budget in pages: an int is pages, a float in [0, 1] a fraction of P, None the default."""
    if value is None:
        return default
    if isinstance(value, float):
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"{name} as a fraction must lie in 0.0..1.0, got {value}")
        return int(value * num_pages)
    if not 0 <= value <= num_pages:
        raise ConfigError(f"{name} must lie in 0..{num_pages} pages, got {value}")
    return value


def _describe(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
