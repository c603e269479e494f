"""What transports over send/receive libraries have in common.

Such a library connects two processes to a *pair*: rank 0 is the server half, rank 1 is a link. A
plug-in contributes a :class:`~torchstore_transports.pairs.pair.Pair` and a function that makes one;
everything else is here: how the two ends meet, how a batch is cut into messages, and what happens
when an end dies, stops or gives up. This package is a library; it registers no transport.
"""
