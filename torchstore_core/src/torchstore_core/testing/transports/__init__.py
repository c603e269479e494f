"""The requirements for transports, as tests: subclass them and give the transport's name.

The tests call both halves directly, through a real volume in another process and in this one, kill
and stop that process, and finally use the transport in a store. So they take some seconds. They
read ``/proc``, so they need Linux. Tests of optional abilities that a transport lacks are skipped.

:class:`torchstore_core.testing.TransportTests` combines the tests of these modules. This package
does not import them, because the processes that the kit starts have no pytest.
"""
