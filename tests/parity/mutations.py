"""Faults on purpose."""

MUTATIONS = {}
