"""Stores of torchrun jobs over several hosts.

No rank becomes part of a Monarch job. The first rank of each host starts a *worker* process, and
rank 0 a *root* process, which attaches to all workers and initialises the store. What the ranks are
told, through their rendezvous and as JSON, is the Unix socket of their own host. They become the
members of the store's server, which ends with the last of them; then root and workers end by
themselves.
"""
