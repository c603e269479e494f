"""A process's session at one store: its connections to the server, and its links to volumes."""
