"""``shm``: shared memory between processes on one host; memfds are passed over a Unix socket."""
