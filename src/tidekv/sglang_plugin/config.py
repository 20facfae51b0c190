"""Settings of the plugin, from the environment: SGLang has no place for a plugin's command-line flags."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tidekv.errors import ConfigError

SWITCH = "TIDEKV_SGLANG"
LOW_READS = ("exact", "window")


@dataclass(frozen=True)
class Settings:
    """What an operator may choose. Every field is one variable, TIDEKV_ and its name in capitals.

    priority_threshold    requests with at least this `priority` are high (with SGLang's low-values-first: at most this)
    overcommit            virtual pages for each physical one, at most; 1 is a stock server's admission
    host_tokens           tokens of host memory for layers that left the device; default: all that are admitted
    low_max_pages, high_reserved_pages   thresholds of the pressure ladder, in pages; default: the core's fractions
    restore_free          fraction of free pages from which widths come back
    overlap               0: a server on a GPU refuses SGLang's overlap scheduling
    low_reads             "exact"; or "window", LOSSY: layers that are not resident do not see a low request's old pages
    window_tokens         most recent tokens that a window reads in every layer, beside the first page
    pausing               0: nobody pauses; the ladder halves a class, and each step streams what it took
    quantum               decode steps that a paused request runs at least when it comes back
    turn_tokens           tokens after which a low request gives way to those that had fewer; 0: order of arrival
    paused_share          part of the pool that paused requests may hold before low newcomers wait unprefilled
    """

    priority_threshold: int = 1
    overcommit: float = 4.0
    host_tokens: int | None = None
    low_max_pages: int | None = None
    high_reserved_pages: int | None = None
    restore_free: float = 0.25
    overlap: bool = True
    low_reads: str = "exact"
    window_tokens: int = 1024
    pausing: bool = True
    quantum: int = 32
    turn_tokens: int = 256
    paused_share: float = 0.0

    def __post_init__(self) -> None:
        if not 1.0 <= self.overcommit <= 64.0:
            raise ConfigError(f"TIDEKV_OVERCOMMIT must lie in 1.0..64.0, got {self.overcommit}")
        if not 0.0 < self.restore_free <= 1.0:
            raise ConfigError(f"TIDEKV_RESTORE_FREE must lie in (0.0, 1.0], got {self.restore_free}")
        if self.low_reads not in LOW_READS:
            raise ConfigError(f"TIDEKV_LOW_READS must be {' or '.join(LOW_READS)}, got {self.low_reads!r}")
        if self.window_tokens < 1:
            raise ConfigError(f"TIDEKV_WINDOW_TOKENS must be >= 1, got {self.window_tokens}")
        if self.quantum < 1 or self.turn_tokens < 0:
            raise ConfigError(
                f"TIDEKV_QUANTUM must be >= 1 and TIDEKV_TURN_TOKENS >= 0, got {self.quantum} and {self.turn_tokens}"
            )
        if not 0.0 <= self.paused_share <= 1.0:
            raise ConfigError(f"TIDEKV_PAUSED_SHARE must lie in 0.0..1.0, got {self.paused_share}")
        if self.host_tokens is not None and self.host_tokens < 0:
            raise ConfigError(f"TIDEKV_HOST_TOKENS must be >= 0, got {self.host_tokens}")


def is_switched_on(environ: Mapping[str, str] = os.environ) -> bool:
    """TIDEKV_SGLANG=1; 0, empty or unset is off. `ConfigError` for anything else: a typo must not run stock."""
    value = environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{SWITCH} must be 1 (on) or 0 (off), got {value!r}")
    return value == "1"


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings; `ConfigError` for a value that is no number, or a TIDEKV_ variable that does not exist."""
    kinds: dict[str, type[int] | type[float] | type[str]] = {
        "PRIORITY_THRESHOLD": int,
        "OVERCOMMIT": float,
        "HOST_TOKENS": int,
        "LOW_MAX_PAGES": int,
        "HIGH_RESERVED_PAGES": int,
        "RESTORE_FREE": float,
        "OVERLAP": int,
        "LOW_READS": str,
        "WINDOW_TOKENS": int,
        "PAUSING": int,
        "QUANTUM": int,
        "TURN_TOKENS": int,
        "PAUSED_SHARE": float,
    }
    unknown = [k for k in environ if k.startswith("TIDEKV_") and k != SWITCH and k[len("TIDEKV_") :] not in kinds]
    if unknown:
        known = ", ".join(f"TIDEKV_{name}" for name in kinds)
        raise ConfigError(f"{', '.join(sorted(unknown))} means nothing to tidekv; there are {SWITCH}, {known}")
    found: dict[str, int | float | str] = {}
    for name, kind in kinds.items():
        text = environ.get(f"TIDEKV_{name}")
        if text:
            try:
                found[name.lower()] = kind(text)
            except ValueError:
                raise ConfigError(f"TIDEKV_{name} must be {kind.__name__}, got {text!r}") from None
    for name in ("overlap", "pausing"):
        if found.get(name, 0) not in (0, 1):
            raise ConfigError(f"TIDEKV_{name.upper()} must be 1 (on) or 0 (off), got {found[name]}")
        if name in found:
            found[name] = bool(found[name])
    return Settings(**found)  # type: ignore[arg-type]
