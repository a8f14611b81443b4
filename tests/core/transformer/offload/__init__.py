"""Tests of activations in the host's memory."""
