"""The index of a store: the versions of each key, both finished and unfinished."""
