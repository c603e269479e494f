"""Who does not use Monarch never meets it; who asks for it without having it is told what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.processes import run_script
from tests.support import free_port

# As if torchstore-monarch were not installed: its entry points are not found.
_WITHOUT = """
    import importlib.metadata as metadata
    found = metadata.distributions

    def distributions(**context):
        return (d for d in found(**context) if d.metadata["Name"] != "torchstore-monarch")

    metadata.distributions = distributions
"""

_USE = """
    import os
    client = await {start}
    await ts.put("small", 1)
    await ts.put("large", torch.ones(1 << 20))
    await ts.put_state_dict({{"w": torch.ones(3)}}, "sd")
    assert int((await ts.get("large")).sum()) == 1 << 20
    await ts.get_state_dict("sd")
    await ts.explain()
    await ts.status()
    with open(f"/proc/{{(await ts.status()).controller_pid}}/maps") as maps:
        print("monarch" in maps.read())
    await ts.shutdown()
    print(sorted(name for name in sys.modules if name.partition(".")[0] == "monarch"))
"""


@pytest.mark.parametrize(
    "start",
    [
        "ts.initialize(capacity=64 << 20, prefault=0)",
        "ts.initialize(runtime='local', capacity=64 << 20, prefault=0)",
        "ts.initialize_spmd(capacity=64 << 20, prefault=0, "
        "env=ts.SPMDEnv(0, 0, 1, 1, '127.0.0.1', {port}))",
    ],
    ids=["auto", "local", "spmd"],
)
async def test_a_job_without_monarch_never_imports_it(start: str) -> None:
    printed = await run_script(_USE.format(start=start.format(port=free_port())))
    assert printed == "False\n[]\n"


@pytest.mark.parametrize(
    "arguments", ["runtime='monarch'", "mesh=object()", "mesh=object(), runtime='monarch'"]
)
async def test_the_error_names_the_package(arguments: str) -> None:
    printed = await run_script(
        f"""{_WITHOUT}
    try:
        await ts.initialize({arguments})
    except ts.TorchStoreError as error:
        print(type(error).__name__, error)
    print("monarch" in sys.modules)
    """,
    )
    error, imported, _ = printed.split("\n")
    assert error.startswith("PluginError")
    assert "pip install torchstore-monarch" in error
    assert imported == "False"


async def test_a_job_of_monarch_without_the_plugin_is_told_what_it_lacks() -> None:
    """``mesh=None`` is no wish for Monarch: a warning; who finds nothing gets an error."""
    printed = await run_script(
        f"""{_WITHOUT}
    import os, warnings
    import monarch.actor
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client = await ts.initialize(capacity=64 << 20, prefault=0)
    print(*[w.message for w in caught if "pip install torchstore-monarch" in str(w.message)])
    print((await ts.address()).partition(":")[0])
    await ts.shutdown()
    try:
        await ts.get("k")
    except ts.StoreClosedError as error:
        print(error)
    """,
    )
    warned, address, error, _ = printed.split("\n")
    assert warned.startswith("this store is for this process and its children")
    assert address == "unix"
    assert "pip install torchstore-monarch" in error


def test_descriptors_do_not_import_monarch() -> None:
    """What is read to know which runtimes and transports there are."""
    import torchstore_monarch

    base = Path(torchstore_monarch.__file__).parent
    for path in [base / "plugin.py", *base.glob("*/plugin.py")]:
        lines = [line.strip() for line in path.read_text().splitlines()]
        assert not [line for line in lines if line.startswith(("import monarch", "from monarch"))]


async def test_the_functions_of_the_descriptor_are_those_of_the_contract() -> None:
    """Names and order of their parameters; what is awaited, and what is not. In a process of its
    own: importing Monarch makes it the default.
    """
    printed = await run_script(
        """
        import importlib, inspect
        from torchstore_core.contracts.engine import Engine
        from torchstore_monarch.plugin import torchstore_runtime

        spec = torchstore_runtime()
        for name in ("find", "end", "rank", "spmd"):
            promised = getattr(Engine, name)
            module, _, function = str(getattr(spec, name)).partition(":")
            ours = getattr(importlib.import_module(module), function)
            assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(promised), name
            wanted = list(inspect.signature(promised).parameters.values())[1:]
            there = list(inspect.signature(ours).parameters.values())
            assert [(p.name, p.kind) for p in there[: len(wanted)]] == [
                (p.name, p.kind) for p in wanted
            ], name
            assert all(p.default is not p.empty for p in there[len(wanted) :]), name
        print("checked")
        """
    )
    assert printed.split() == ["checked"]
