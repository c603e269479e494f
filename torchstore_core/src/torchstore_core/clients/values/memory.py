"""Copies within this process, by the same copy threads as transfers."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from torchstore_core.clients.values.tensors import (
    address_of,
    byte_like,
    split_rows,
    strided_copy,
)
from torchstore_core.machine import copying


async def copy_tensors(key: str, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy ``(target, source)`` pairs of CPU tensors with the copy threads, without blocking the
    event loop. The tensors of a pair have the same shape and dtype.

    Raises:
        UnsupportedValueError: the storage of one of them was freed; the error names ``key``.
    """
    pieces: list[copying.Run] = []
    strided: list[tuple[torch.Tensor, torch.Tensor]] = []
    total = 0
    for target, source in pairs:
        nbytes = source.nbytes
        total += nbytes
        to, of = address_of(key, target), address_of(key, source)
        if target.is_contiguous() and source.is_contiguous():
            pieces.append((to, of, nbytes))
        else:
            strided += split_rows(byte_like(target), byte_like(source), copying.CHUNK)
    stream = total >= copying.STREAM_MIN
    tasks = [strided_copy(to, of, stream=stream) for to, of in strided]
    tasks += [
        functools.partial(copying.copy_pieces, chunk, stream=stream)
        for chunk in copying.cut(pieces, copying.chunk_size(total))
    ]
    await copying.run(tasks, total)
