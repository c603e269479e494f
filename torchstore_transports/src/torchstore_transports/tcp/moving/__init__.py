"""The client half: batches become units, which streams move over connections."""
