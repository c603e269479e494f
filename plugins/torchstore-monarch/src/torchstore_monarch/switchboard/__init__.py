"""The process that owns a store's server, and to which all relays lead, whichever actor carries it.

The engine's actors come and go with the engine's processes: what they carry must not. So the server
is not the actor's, and neither are the connections of other hosts' clients: both belong to a small
process without the engine. An actor only carries messages between it and the relays; if it dies,
the directory starts another one, and each relay goes on with what the other end has not received.
"""
