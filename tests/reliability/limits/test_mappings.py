"""Mappings that run out in a client (``vm.max_map_count``): an error by name, and it passes."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, ctypes, mmap
import torch
import torchstore_core as ts

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
FAILED = ctypes.c_void_p(-1).value

def use_up(leave):
    "Mappings of which no two can become one."
    made = []
    while True:
        allowed = mmap.PROT_READ if len(made) % 2 else 0
        address = libc.mmap(None, 4096, allowed, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if address == FAILED:
            break
        made.append(address)
    while leave:
        libc.munmap(made.pop(), 4096)
        leave -= 1
    return made

async def main():
    await ts.initialize(capacity=1 << 30, prefault=0)
    value = torch.arange(1 << 20)
    for number in range(60):
        await ts.put(f"k{number}", value + number)
    made = use_up(20)
    got = []
    try:
        while len(got) < 60:
            got.append(await ts.get(f"k{len(got)}"))
    except ts.OutOfMemoryError as error:
        assert error.details == {"requested_bytes": value.nbytes}
        assert isinstance(error, MemoryError)
    assert len(got) < 60
    await ts.get("k0", got[0])  # into memory that is there
    count = len(got)
    del got
    async with asyncio.timeout(60):
        while (await ts.status()).volumes[0].leased_bytes:
            await asyncio.sleep(0.01)
    for address in made:
        libc.munmap(address, 4096)
    got = [await ts.get(f"k{number}") for number in range(60)]
    assert all(torch.equal(one, value + number) for number, one in enumerate(got))
    await ts.shutdown()
    print("passed", count)

asyncio.run(main())
"""


def test_a_client_without_mappings_says_so_and_goes_on() -> None:
    command = [sys.executable, "-P", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("passed")
