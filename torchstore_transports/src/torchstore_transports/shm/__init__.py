"""``shm``: shared memory between processes of one host, by passing memfds over a Unix socket."""
