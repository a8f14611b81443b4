"""The same numbers however a model is split: every strategy in every layout against one process.

``pytest tests/parity`` runs a part of the matrix, ``pytest tests/parity -m matrix`` the whole. See README.md.
"""
