"""What happens when memory is full: values that move to disk, and values of a cache that go."""
