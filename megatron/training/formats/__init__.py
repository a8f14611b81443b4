"""Checkpoints of other programs: Hugging Face models and Megatron-LM's formats, read and written part by part.

A folder's files are described by our tensors as views of theirs (``rules`` is the language of these tables), so that a rank
reads only what it holds. ``find_foreign`` recognises a folder.
"""
