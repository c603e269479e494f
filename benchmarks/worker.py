"""The program of a measured process: the commands of ``torchstore bench``, and more.

``python worker.py LOOP``; see ``torchstore_cli.bench.worker_main``.
"""

from __future__ import annotations

import sys

from measured.checkpoints import Checkpoints
from measured.devices import OnDevice
from measured.dicts import Dicts
from measured.full_memory.spilling import MoreThanMemory
from measured.libraries.beside import BesideLibrary
from measured.many_keys import ManyKeys
from measured.mapped import MappedTensors
from measured.monarch.jobs import Job
from measured.network.loopback import OverNetwork
from measured.network.namespaces import BetweenNetworks
from measured.references.objects import References
from measured.several_volumes import SeveralVolumes
from measured.snapshots.access import SnapshotAccess
from measured.snapshots.files import SnapshotFiles
from measured.snapshots.trainer import Trainer

from torchstore_cli.bench.worker_main import Stores, serve, standard_commands


def main(loop: str) -> None:
    """Serve all commands."""
    stores = Stores(loop)
    dicts = Dicts(stores.run)
    job = Job(stores.run)
    commands = standard_commands(stores)
    serve(
        commands
        | {
            "dicts": dicts,
            "checkpoints": Checkpoints(dicts),
            "devices": OnDevice(stores.run),
            "keys": ManyKeys(stores.run),
            "mapped": MappedTensors(stores.run),
            "references": References(stores.run),
            "volumes": SeveralVolumes(stores.run),
            "network": OverNetwork(stores.run),
            "libraries": BesideLibrary(stores.run),
            "networks": BetweenNetworks(stores.run, dicts),
            "spilling": MoreThanMemory(stores.run),
            "job": job,
            "snapshot-access": SnapshotAccess(),
            "snapshot-files": SnapshotFiles(),
            "trainer": Trainer(stores.run),
        }
    )
    commands["small"].end_echo()
    dicts.drop()
    stores.close()
    job.end()


if __name__ == "__main__":
    main(sys.argv[1])
