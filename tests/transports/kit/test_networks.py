"""The networks that the kit's tests make."""

from __future__ import annotations

import contextlib

from tests.processes import run_script

from torchstore_core.testing.networks import free_number, two_networks

_ASK = """
    import os
    from torchstore_core.testing.networks import free_number
    os.getpid = lambda: {pid}  # as a process whose number begins the search at the same place
    with free_number() as number:
        print(number)
    """


async def test_no_two_processes_get_the_same_number_of_a_subnet() -> None:
    with free_number() as mine:
        assert int(await run_script(_ASK.format(pid=mine))) != mine


def test_networks_that_are_there_at_the_same_time_share_no_address() -> None:
    with contextlib.ExitStack() as made:
        pairs = [made.enter_context(two_networks(here=True)) for _ in range(2)]
        networks = {space.address.rpartition(".")[0] for pair in pairs for space in pair}
        assert len(networks) == 2
