"""Names at Megatron-LM's import path; the code is in ``megatron.core.datasets.fim_dataset``."""

from megatron.core.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig

__all__ = ["GPTFIMDataset", "GPTFIMDatasetConfig"]
