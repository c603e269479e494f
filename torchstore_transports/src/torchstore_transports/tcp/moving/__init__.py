"""The client half: batches are cut into units, which streams move over connections."""
