"""The versioned wire protocol of the control channel: message types and framing. Torch-free."""
