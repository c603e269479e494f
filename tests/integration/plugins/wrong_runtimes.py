"""Runtimes that each do one thing wrong, for the tests of the conformance kit; and one engine with
names that does all right.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from typing import ClassVar

import msgspec

from torchstore_core.contracts.runtime import Runtime, RuntimeSpec, StoreOptions
from torchstore_core.errors import ConfigurationError
from torchstore_core.machine.directories import runtime_directory
from torchstore_core.runtimes.local import LocalRuntime

HERE = __name__


class Forgetful(LocalRuntime):
    """Does not end what it started."""

    async def stop(self, timeout: float) -> None:
        return

    async def really_stop(self) -> None:
        await super().stop(5.0)


class Deaf(LocalRuntime):
    """Does not pass the options on."""

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        return await super().start(StoreOptions("other", capacity=1 << 20), mesh)


class Unblocking(LocalRuntime):
    """Passes all on but ``block``."""

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        return await super().start(msgspec.structs.replace(options, block=()), mesh)


class Littering(LocalRuntime):
    """Leaves a directory."""

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        tempfile.mkdtemp(prefix="litter-", dir=runtime_directory())
        return await super().start(options, mesh)


class Leaking(LocalRuntime):
    """Keeps a descriptor of each store."""

    kept: ClassVar[list[int]] = []

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        self.kept.append(os.open("/dev/null", os.O_RDONLY))
        return await super().start(options, mesh)

    @classmethod
    def clean(cls) -> None:
        while cls.kept:
            os.close(cls.kept.pop())


class Threading(LocalRuntime):
    """Keeps a thread of each store."""

    end: ClassVar[threading.Event] = threading.Event()

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        threading.Thread(target=self.end.wait, daemon=True).start()
        return await super().start(options, mesh)

    @classmethod
    def clean(cls) -> None:
        cls.end.set()


class Orphaning(LocalRuntime):
    """Has a process that does not see that its owner is gone."""

    def __init__(self) -> None:
        super().__init__()
        self._orphan: subprocess.Popen[bytes] | None = None

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        self._orphan = subprocess.Popen(
            ["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL
        )
        return await super().start(options, mesh)


class Named(LocalRuntime):
    """An engine of this process, that knows its stores by name."""

    shared = True
    stores: ClassVar[dict[str, tuple[str, Runtime]]] = {}
    _name = ""

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        name = options.store_name
        if name in self.stores:
            raise ConfigurationError(f"there is a store {name!r} already")
        address = await super().start(options, mesh)
        self._name = name
        self.stores[name] = address, self
        return address

    async def stop(self, timeout: float) -> None:
        if self.stores.get(self._name, ("", None))[1] is self:
            del self.stores[self._name]
        await super().stop(timeout)


class Careless(Named):
    """Takes a name twice, and forgets the first."""

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        self.stores.pop(options.store_name, None)
        return await super().start(options, mesh)


async def find(store_name: str, timeout: float | None) -> str | None:
    return Named.stores.get(store_name, (None, None))[0]


async def find_nothing(store_name: str, timeout: float | None) -> str | None:
    return None


async def find_anything(store_name: str, timeout: float | None) -> str | None:
    return "unix:/nowhere"


async def end(store_name: str, timeout: float | None) -> bool:
    if store_name not in Named.stores:
        return False
    await Named.stores[store_name][1].stop(5.0)
    return True


async def end_nothing(store_name: str, timeout: float | None) -> bool:
    return False


async def end_anything(store_name: str, timeout: float | None) -> bool:
    return True


async def end_in_words(store_name: str, timeout: float | None) -> bool:
    """Says so, and the store goes on under its name."""
    return store_name in Named.stores


def spec(*, factory: str = "Named", find: str = "find", end: str = "end") -> RuntimeSpec:
    return RuntimeSpec(
        "named",
        f"{HERE}:{factory}",
        lambda mesh: 1 if mesh is None else None,
        here=lambda: bool(Named.stores),
        find=f"{HERE}:{find}",
        end=f"{HERE}:{end}",
    )
