"""What is remembered of versions that are gone."""
