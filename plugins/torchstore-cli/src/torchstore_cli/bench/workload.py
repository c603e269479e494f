"""A set of tensors shaped like Qwen3-4B's weights, at any size, filled with random bits.

There are 327 bfloat16 tensors: embedding, head and last norm, and nine in each of 36 layers (four
attention projections of hidden × hidden, three of the MLP, two norms). At full size they have 8.40
GB (7.82 GiB). Smaller sets keep the 327 tensors: hidden, intermediate and vocabulary sizes shrink
by one common factor, and are rounded as in models, so that the large tensors keep their shares of
the whole. Another set has many small tensors; ``benchmarks/`` has those of named models, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

__all__ = [
    "DTYPE",
    "FULL_GB",
    "Shapes",
    "experts",
    "make",
    "make_empty",
    "nbytes",
    "one_thread",
    "random_tensor",
    "received",
    "shapes",
    "sizes",
    "stamp",
    "wrong",
]

HIDDEN, INTERMEDIATE, VOCABULARY, LAYERS = 2560, 8960, 151936, 36
FULL_GB = 8.398
DTYPE = torch.bfloat16
_TOP_OF_EXPONENT = 0x4000

#: The shapes of a set by name, in the order of the set.
Shapes = Mapping[str, tuple[int, ...]]


def shapes(gb: float) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name of a set of about ``gb`` GB (1e9 bytes).

    >>> full = shapes(FULL_GB)
    >>> len(full), full["model.embed_tokens.weight"], round(nbytes(full) / 2**30, 2)
    (327, (151936, 2560), 7.82)
    >>> len(shapes(0.76)), round(nbytes(shapes(0.76)) / 1e9, 2)
    (327, 0.76)
    """
    factor = (gb / FULL_GB) ** 0.5
    hidden, intermediate, vocabulary = (
        _rounded(n * factor) for n in (HIDDEN, INTERMEDIATE, VOCABULARY)
    )
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        made[prefix + "input_layernorm.weight"] = (hidden,)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            made[f"{prefix}self_attn.{name}.weight"] = (hidden, hidden)
        made[prefix + "post_attention_layernorm.weight"] = (hidden,)
        made[prefix + "mlp.gate_proj.weight"] = (intermediate, hidden)
        made[prefix + "mlp.up_proj.weight"] = (intermediate, hidden)
        made[prefix + "mlp.down_proj.weight"] = (hidden, intermediate)
    made["model.norm.weight"] = (hidden,)
    made["lm_head.weight"] = (vocabulary, hidden)
    return made


def _rounded(size: float) -> int:
    """Round to a multiple of 64, as in models, or of less if that would change the size by 1 %.

    >>> _rounded(770.1), _rounded(279.35), _rounded(3.2)
    (768, 280, 3)
    """
    for unit in (64, 32, 16, 8, 4, 2):
        near = round(size / unit) * unit
        if abs(near - size) < 0.01 * size:
            return near
    return max(1, round(size))


def experts(count: int, nbytes: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name of small tensors of ``nbytes`` bytes, named like a model's experts.

    >>> list(experts(376, 4096).items())[-1]
    ('model.layers.1.mlp.experts.0.gate_proj.weight', (2048,))
    """
    projections = ("gate_proj", "up_proj", "down_proj")
    return {
        f"model.layers.{i // 375}.mlp.experts.{i % 375 // 3}.{projections[i % 3]}.weight": (
            nbytes // DTYPE.itemsize,
        )
        for i in range(count)
    }


def received(shapes: Mapping[str, Sequence[int]]) -> Shapes:
    """Convert shapes that were decoded from JSON."""
    return {name: tuple(shape) for name, shape in shapes.items()}


def sizes(of: Shapes) -> list[int]:
    """Return the bytes of each tensor, in order."""
    return [torch.Size(shape).numel() * DTYPE.itemsize for shape in of.values()]


def nbytes(of: Shapes) -> int:
    """Return the bytes of the whole set."""
    return sum(sizes(of))


def random_tensor(shape: tuple[int, ...], seed: int, *, finite: bool = False) -> torch.Tensor:
    """Return random bits, the same in every process; with NaNs and infinities unless ``finite``."""
    count = torch.Size(shape).numel()
    words = torch.empty(count * DTYPE.itemsize // 8 + 1, dtype=torch.int64)
    words.random_(-(2**63), None, generator=torch.Generator().manual_seed(seed))
    if finite:
        words.view(torch.int16).bitwise_and_(~_TOP_OF_EXPONENT)
    return words.view(DTYPE)[:count].view(shape)


def make(of: Shapes, seed: int) -> dict[str, torch.Tensor]:
    """Return the filled set. Tensor i has the bits of ``random_tensor(shape, seed + i)``."""
    return {name: random_tensor(shape, seed + at) for at, (name, shape) in enumerate(of.items())}


def make_empty(of: Shapes) -> dict[str, torch.Tensor]:
    """Return destinations for the set: zeros, in memory that has been written once."""
    return {name: torch.zeros(shape, dtype=DTYPE) for name, shape in of.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch work in this thread alone: if other processes use the CPUs, too, the threads of
    OpenMP wait for each other ten times longer than the work takes.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def stamp(tensors: dict[str, torch.Tensor], number: int) -> None:
    """Write ``number`` into the first and the last element of every tensor, so that each version of
    the set differs from the previous one in every tensor.
    """
    for tensor in tensors.values():
        bits = tensor.view(torch.int16).view(-1)
        bits[0] = bits[-1] = number


def wrong(
    tensors: dict[str, torch.Tensor], of: Shapes, seed: int, number: int, *, full: bool
) -> list[str]:
    """Return the names of tensors that differ from those of the set with that stamp.

    ``full``: whether all bytes are compared; otherwise only shape, dtype and stamp.
    """
    bad: list[str] = []
    for at, (name, shape) in enumerate(of.items()):
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype != DTYPE or tuple(tensor.shape) != shape:
            bad.append(name)
            continue
        bits = tensor.contiguous().view(torch.int16).view(-1)
        if full:
            want = random_tensor(shape, seed + at)
            stamp({name: want}, number)
            if not torch.equal(bits, want.view(torch.int16).view(-1)):
                bad.append(name)
        elif int(bits[0]) != number or int(bits[-1]) != number:
            bad.append(name)
    return bad + [name for name in tensors if name not in of]
