"""``torchstore bench``, and what it shares with ``benchmarks/`` of the repository.

==================  ===============================================================================
``measurement.py``  the command: a short measurement, as a report
``transports.py``   the command with ``--transports``: every transport to every volume
``view.py``         the reports as tables
``workers.py``      starts, commands and ends the measured processes
``worker_main.py``  the program of a measured process, and its commands on whole stores
``weights.py``      its commands on a large set of tensors: put, in-place get, zero-copy get
``small.py``        its commands on small values: one at a time, in a batch, in cycles
``workload.py``     the sets of tensors, and the check that none of their bits changed
``floors.py``       what the machine does without a store: copies, first touches, clones, mappings
``echo.py``         the floor of small values: a message to another process and back
``measuring.py``    clocks, percentiles, sizes of processes, and waiting for a store to settle
==================  ===============================================================================
"""
