"""This process at one store: its session, its connections, its links to volumes."""
