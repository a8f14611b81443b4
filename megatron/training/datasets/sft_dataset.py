"""Names at Megatron-LM's import path; the code is in ``megatron.core.datasets``."""

from megatron.core.datasets.conversation_file import SFTLowLevelDataset
from megatron.core.datasets.sft_dataset import SFTDataset
from megatron.core.tokenizers.sft_tokenizer import IGNORE_INDEX

__all__ = ["IGNORE_INDEX", "SFTDataset", "SFTLowLevelDataset"]
