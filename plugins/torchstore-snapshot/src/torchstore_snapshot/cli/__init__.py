"""``torchstore snapshot``: what a person, or a script, does with snapshots.

The ``torchstore`` command finds :data:`~.commands.snapshot` by the entry point of this package in
the group ``torchstore.commands``. It needs click and rich, which torchstore-cli brings.
"""
