"""What a value is in memory: tensors, shards, and any other object as bytes."""
