"""Stores of torchrun jobs over several hosts.

No rank becomes part of a Monarch job. The first rank of each host starts a *worker* process, and
rank 0 starts a *root* process, which attaches to all workers and initialises the store. Through
their rendezvous, as JSON, the ranks learn the Unix socket of their own host. They become members of
the store's server, which ends with the last of them; then the root and the workers end by
themselves.
"""
