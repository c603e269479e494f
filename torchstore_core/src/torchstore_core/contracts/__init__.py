"""The contracts for plug-ins: transports, strategies, runtimes, engines, observers, and hooks.

Nothing here imports torch, because the server loads these modules, too.
"""
