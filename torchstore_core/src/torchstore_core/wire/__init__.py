"""The versioned wire protocol of the control lane: message types and framing. Torch-free."""
