"""Model, data and distribution code under the import paths that Megatron-Core users know."""

__version__ = "0.2.0"
