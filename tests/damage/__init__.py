"""Damage on purpose, in numbers: mutated corpora and checkpoints, and processes killed at random moments.

Each script counts how its trials ended and fails if one ended as none may; CI runs a small sample of each::

    python -m tests.damage.corpora --trials 2000
    python -m tests.damage.checkpoints --trials 400
    python -m tests.damage.kills --trials 100
"""
