"""From values in memory to a committed snapshot."""
