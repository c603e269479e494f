"""What a store tells of itself, for people: sizes, times and summaries."""
