"""Serving the clients of this host: sockets, conversations, replies, the journal."""
