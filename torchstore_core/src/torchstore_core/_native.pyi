from array import array
from collections.abc import Callable
from mmap import mmap
from typing import Any, TypeVar

D = TypeVar("D")
_Methods = tuple[
    Callable[[Any], bool], Callable[[Any], int], Callable[[Any], Any], Callable[[Any], int]
]

def copy_runs(runs: list[tuple[int, int, int]], base: int, into: bool, stream: bool, /) -> None: ...
def copy_columns(
    addresses: list[int],
    offsets: list[int],
    sizes: list[int],
    base: int,
    into: bool,
    stream: bool,
    /,
) -> None: ...
def copy_rows(grids: array[int], stream: bool, /) -> None: ...
def copy_strided(numbers: array[int], /) -> None: ...
def append_record(
    memory: mmap, kind: int, session: int, at: float, body: bytes | bytearray, /
) -> int: ...
def checksum(data: memoryview, /) -> int: ...
def hash_runs(runs: list[tuple[int, int, int]], /) -> bytes | None: ...
def guard(address: int, nbytes: int, /) -> int: ...
def is_lost(guard: int, /) -> bool: ...
def unguard(guard: int, owner: object = None, /) -> None: ...
def transfer(fd: int, rows: array[int], sending: bool, more: bool, /) -> int: ...
def look(
    api: object,
    types: tuple[type, type],
    methods: _Methods,
    describe: Callable[[Any], D],
    known: dict[bytes, D],
    values: list[Any],
    memory: bool,
    device: int,
    /,
) -> tuple[list[D | None], list[int], list[int], list[Any]]: ...
def still(
    api: object,
    methods: _Methods,
    values: list[Any],
    addresses: list[int],
    sizes: list[int],
    device: int,
    /,
) -> list[Any] | None: ...
