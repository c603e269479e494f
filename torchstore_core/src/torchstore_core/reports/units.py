"""Conversion of sizes and times from and to the form in which people write and read them."""

from __future__ import annotations

import re

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)(b?)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the bytes of a size with or without a unit; a letter alone means the binary unit.

    Raises:
        ValueError: ``text`` is not a size.

    >>> parse_bytes("4096"), parse_bytes("512MB"), parse_bytes("8GiB"), parse_bytes("1.5g")
    (4096, 512000000, 8589934592, 1610612736)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is not a size like 4096, 512MB or 8GiB")
    base = 1000 if match[4] and not match[3] else 1024
    unit = base ** (" kmgtp".index(match[2].lower()) if match[2] else 0)
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def human_bytes(nbytes: int) -> str:
    """Return a size as text, in binary units.

    >>> human_bytes(0), human_bytes(1023), human_bytes(1536), human_bytes(512 << 20)
    ('0 B', '1023 B', '1.5 KiB', '512 MiB')
    """
    if nbytes < 1024:
        return f"{nbytes} B"
    power = min((nbytes.bit_length() - 1) // 10, len(_BINARY) - 1)
    size = nbytes / (1 << 10 * power)
    if size >= 1023.5 and power < len(_BINARY) - 1:  # would show as 1024
        power, size = power + 1, size / 1024
    return f"{size:.{0 if size >= 99.95 else 1}f} {_BINARY[power]}"


def human_latency(seconds: float) -> str:
    """Return a short time as text.

    >>> human_latency(0), human_latency(11e-5), human_latency(0.0042), human_latency(2.5)
    ('0 µs', '110 µs', '4.20 ms', '2.50 s')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def human_duration(seconds: float) -> str:
    """Return a long time as text, in its two largest units.

    >>> human_duration(0.4), human_duration(63), human_duration(7384), human_duration(200_000)
    ('0 s', '1 min 03 s', '2 h 03 min', '2 d 07 h')
    """
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"
