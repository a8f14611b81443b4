"""Layers whose memory of earlier tokens is a state of constant size."""
