"""Activations in the host's memory."""
