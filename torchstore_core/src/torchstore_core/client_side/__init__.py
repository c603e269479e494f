"""The client: sessions and lanes, codec, tensors, planning of puts and gets."""
