"""Stores of torchrun jobs over several hosts.

No rank becomes part of a Monarch job. The first rank of each host starts a *worker* process, rank 0
a *root* process that attaches to all of them and initialises the store; what the ranks are told,
through the rendezvous store and as JSON, is the Unix socket of their own host. The store ends when
rank 0 and all others have left it; then root and workers end by themselves.
"""
