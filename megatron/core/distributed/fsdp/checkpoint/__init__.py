"""Checkpoints in PyTorch's DCP format, which any number of ranks and any strategy can load.

A checkpoint is a folder with these entries:

- ``<name in the unwrapped model>``: a main weight or persistent buffer, whole, however it was split between ranks
  (data, tensor or expert parallelism, pipeline stages). Tied weights have one entry, under their first name. Where a module
  has ``names_in_checkpoint``, a mapping of names relative to it, tensors have those names.
- ``optimizer.state.<parameter>.<key>``: optimizer state.
- ``optimizer.param_groups``, ``optimizer.kind``: hyperparameters, by the names of the parameters that they are for.
- ``optional_state.<module>``: what ``get_optional_state`` of a module returned, unless None. What is not there is left as it
  is, and what no module has is left unread.
- ``extra_state.<key>``: what the caller of ``save_checkpoint`` gave on rank 0.
- ``extra_state.per_rank.<rank>``: what each rank gave as ``extra_state["per_rank"]``.

Next to the data files lie ``checkpoint.json``, which says where in them each entry is and has its checksums, ``.metadata``, which
says the same to DCP, and ``.saved-by-megatron-fsdp``, by which a later save knows that the folder may be replaced.
"""

from megatron.core.distributed.fsdp.checkpoint.agreement import agree, raised_on_all_ranks
from megatron.core.distributed.fsdp.checkpoint.chunks import Chunk, chunks_to_write, local_chunks
from megatron.core.distributed.fsdp.checkpoint.description import Entries, Place, StoredChunk, StoredTensor, StoredValue
from megatron.core.distributed.fsdp.checkpoint.files import begin_parts, write_alone, write_parts
from megatron.core.distributed.fsdp.checkpoint.folder import (
    begin_deletion,
    check_replaceable,
    delete_folder,
    delete_leftovers,
    is_complete,
)
from megatron.core.distributed.fsdp.checkpoint.load import load_checkpoint
from megatron.core.distributed.fsdp.checkpoint.optimizer import hyperparameter_names
from megatron.core.distributed.fsdp.checkpoint.pickles import (
    ArchivedTensor,
    Record,
    read_archive,
    read_inert,
    read_plain_pickle,
)
from megatron.core.distributed.fsdp.checkpoint.reader import CheckpointReader, TensorReader
from megatron.core.distributed.fsdp.checkpoint.save import AsyncSave, planned_nbytes, save_checkpoint
from megatron.core.distributed.fsdp.checkpoint.state import EXTRA_STATE, OBJECT, OPTIMIZER, NamedTensor
from megatron.core.distributed.fsdp.checkpoint.views import (
    ForeignLayout,
    Part,
    View,
    ViewReader,
    Views,
    inverse,
    stored_sizes,
)

__all__ = [
    "EXTRA_STATE",
    "OBJECT",
    "OPTIMIZER",
    "ArchivedTensor",
    "AsyncSave",
    "CheckpointReader",
    "Chunk",
    "Entries",
    "ForeignLayout",
    "NamedTensor",
    "Part",
    "Place",
    "Record",
    "StoredChunk",
    "StoredTensor",
    "StoredValue",
    "TensorReader",
    "View",
    "ViewReader",
    "Views",
    "agree",
    "begin_deletion",
    "begin_parts",
    "check_replaceable",
    "chunks_to_write",
    "delete_folder",
    "delete_leftovers",
    "hyperparameter_names",
    "inverse",
    "is_complete",
    "load_checkpoint",
    "local_chunks",
    "planned_nbytes",
    "raised_on_all_ranks",
    "read_archive",
    "read_inert",
    "read_plain_pickle",
    "save_checkpoint",
    "stored_sizes",
    "write_alone",
    "write_parts",
]
