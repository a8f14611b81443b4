"""Megatron-LM's training module for code that is written for it: a thin layer over ``arguments`` and ``launch``.

``state.py`` is the only place that remembers anything; nothing of the training loop reads it.
"""
