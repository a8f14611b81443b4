"""Checkpoints of Megatron-LM: ``torch_dist``, ``fsdp_dtensor``, and the older ``torch``."""

from megatron.training.formats.megatron_lm.distributed import in_our_names, open_distributed
from megatron.training.formats.megatron_lm.legacy import RANK_FOLDER, open_legacy
from megatron.training.formats.megatron_lm.writing import SavedRun, args_to_save, layout_of, optimizer_steps

__all__ = [
    "RANK_FOLDER",
    "SavedRun",
    "args_to_save",
    "in_our_names",
    "layout_of",
    "open_distributed",
    "open_legacy",
    "optimizer_steps",
]
