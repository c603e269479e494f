"""The requirements for transports, as tests: subclass them and give the transport's name.

They talk to both halves directly, through a real volume in another process and in this one, kill
and stop that process, and finally use the transport in a store. So they take some seconds. Linux
only: they read ``/proc``. Abilities that a transport does not declare are skipped, by name.

:class:`torchstore_core.testing.TransportTests` puts the tests of these modules together. This
module imports none of them: the processes that the kit starts need no pytest.
"""
