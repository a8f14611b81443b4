"""Sharded checkpoints in PyTorch's DCP format."""
