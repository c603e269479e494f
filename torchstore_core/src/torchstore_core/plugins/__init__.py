"""Finding installed plug-ins, choosing a link's transport, and strategies as plain data."""
