"""What a plug-in author implements: transports, strategies, runtimes, observers, and the hooks.

Nothing here imports torch; the server loads these modules too.
"""
