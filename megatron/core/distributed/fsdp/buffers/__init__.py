"""The flat weight and gradient buffers of a parameter group."""
