"""Durations, sizes and rates as people write them, and the mistakes that units invite."""

from __future__ import annotations

import math
import re

from elastic.errors import ConfigError
from policies.domain import Finding

__all__ = ["duration", "duration_text", "implausible", "node_counts", "rate_bytes_per_s", "share", "size_bytes"]

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+"
_PART = re.compile(rf"({_NUMBER})\s*(ms|min|s|m|h|d|w)")
_BYTES = {
    "b": 1.0,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "pb": 1e15,
    "kib": 2.0**10,
    "mib": 2.0**20,
    "gib": 2.0**30,
    "tib": 2.0**40,
    "pib": 2.0**50,
}
_SIZE = re.compile(rf"({_NUMBER})\s*([kmgtp]?i?b)?", re.IGNORECASE)


def duration(field: str, text: str, *, zero: bool = True) -> float:
    """Seconds of ``45s``, ``6h``, ``3d``, ``1h30m``, ``250ms`` or a bare number of seconds. Raises ``ConfigError``."""
    cure = "give a duration like 45s, 6h, 3d or 1h30m; a bare number means seconds"
    plain = text.strip().lower()
    try:
        seconds = float(plain)
    except ValueError:
        parts = _PART.findall(plain)
        if not parts or _PART.sub("", plain).strip():
            raise ConfigError(field, text, cure) from None
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if not math.isfinite(seconds):
        raise ConfigError(field, text, "it must be finite; leave the option out if it is unknown")
    if seconds < 0 or (seconds == 0 and not zero):
        raise ConfigError(field, text, "it must be above 0" if not zero else "it must not be negative")
    return seconds


def size_bytes(field: str, text: str) -> float:
    """Bytes of ``40GB``, ``16GiB`` or a bare number of bytes. Raises ``ConfigError``."""
    match = _SIZE.fullmatch(text.strip())
    value = float(match.group(1)) * _BYTES[(match.group(2) or "b").lower()] if match else -1.0
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(field, text, "give a size above 0 like 40GB or 16GiB; a bare number means bytes")
    return value


def rate_bytes_per_s(field: str, text: str) -> float:
    """Bytes per second of ``5GB/s``, ``800MB`` (per second) or ``100Gbit/s``. Raises ``ConfigError``."""
    plain = re.sub(r"\s*(/s|ps)$", "", text.strip(), flags=re.IGNORECASE)
    bits = re.sub(r"bit$", "b", plain, flags=re.IGNORECASE) if plain.lower().endswith("bit") else None
    try:
        return size_bytes(field, bits) / 8 if bits else size_bytes(field, plain)
    except ConfigError:
        raise ConfigError(field, text, "give a rate above 0 like 5GB/s or 100Gbit/s") from None


def share(field: str, value: float, *, one: bool = False) -> float:
    """``value`` if it lies in [0, 1), or in (0, 1] with ``one``. Raises ``ConfigError``."""
    inside = 0 < value <= 1 if one else 0 <= value < 1
    if not inside:
        what = "above 0 and at most 1" if one else "at least 0 and below 1"
        hint = f"; {value:g} percent is {value / 100:g}" if 1 < value <= 100 else ""
        raise ConfigError(field, value, f"it is a share, {what}{hint}")
    return value


def node_counts(field: str, text: str) -> tuple[int, ...]:
    """The node counts of ``64`` or ``64,256,1024``, ascending. Raises ``ConfigError``."""
    counts = []
    for part in text.split(","):
        try:
            count = int(part)
        except ValueError:
            count = 0
        if count < 1:
            raise ConfigError(field, text, "give whole numbers of at least 1, like 64 or 64,256,1024")
        counts.append(count)
    return tuple(sorted(set(counts)))


def duration_text(seconds: float) -> str:
    """A duration for people: ``12.5 s``, ``18 min 36 s``, ``3 h 5 min``, ``2 d 4 h``."""
    if not math.isfinite(seconds):
        return "unbounded"
    if seconds < 10:
        return f"{seconds:.3g} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    if hours < 24 * 1000:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours / 24:.3g} d"


def implausible(
    *,
    mtbf_s: float | None = None,
    visible_s: float | None = None,
    restart_s: float | None = None,
    step_time_s: float | None = None,
) -> list[Finding]:
    """What looks like a mistaken unit: hours given as seconds, milliseconds as seconds."""
    found = []

    def doubt(name: str, value: float, guess: str) -> None:
        found.append(
            Finding("W_UNITS", "warn", f"{name} is {duration_text(value)}: {guess}; a bare number means seconds")
        )

    if mtbf_s is not None and mtbf_s < 300:
        doubt("the MTBF", mtbf_s, f"few jobs fail that often, was {mtbf_s:g}h meant")
    if mtbf_s is not None and mtbf_s > 20 * 365 * 86400:
        doubt("the MTBF", mtbf_s, "hardly a job lives that long, was a smaller unit meant")
    if visible_s is not None and visible_s > 1800:
        doubt("the visible cost of a save", visible_s, f"few saves stop training that long, was {visible_s:g}ms meant")
    if restart_s is not None and restart_s > 4 * 3600:
        doubt("the restart", restart_s, f"few restarts take that long, was {restart_s:g}ms meant")
    if step_time_s is not None and step_time_s > 600:
        doubt("the step time", step_time_s, f"few steps take that long, was {step_time_s:g}ms meant")
    return found
