"""Documents within samples: attention stays within them where ``reset_attention_mask`` asks for it, or samples are packs.

Shapes: b samples of a microbatch, s tokens of a sample, m documents of a microbatch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from megatron.core.packed_seq_params import DocumentsOfRows

_DOCUMENTS, _STARTS = "documents", "document_starts"


class WithDocuments(Dataset[dict[str, Tensor]]):
    """A dataset whose samples also say of which document each token is: ``documents`` [s], int32, from 0.

    Args:
        dataset: of dicts of tensors, with ``tokens``.
        eod: the id that ends a document, and belongs to it; None: samples are packs, which have ``cu_seqlens``, where documents
            begin, and ``max_seqlen``.
    """

    def __init__(self, dataset: Any, eod: int | None) -> None:
        self.dataset, self.eod = dataset, eod

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        sample: dict[str, Tensor] = self.dataset[idx]
        length = len(sample["tokens"])
        if self.eod is None:
            rest = {name: value for name, value in sample.items() if name not in ("cu_seqlens", "max_seqlen")}
            starts = sample["cu_seqlens"][1:]  # filled up with the length
            return {**rest, _DOCUMENTS: torch.searchsorted(starts, torch.arange(length), right=True, out_int32=True)}
        documents = torch.zeros(length, dtype=torch.int32)
        documents[1:] = (sample["tokens"][:-1] == self.eod).cumsum(0)
        return {**sample, _DOCUMENTS: documents}


def collate(samples: list[Any]) -> dict[str, Any]:
    """Stack samples over [b]; where they say of which document tokens are, add ``document_starts`` [m + 1], int32.

    Starts count the tokens of all rows, one after the other. They are made here, since the host must know their number.
    """
    batch: dict[str, Any] = default_collate(samples)
    documents = batch.get(_DOCUMENTS)
    if documents is not None:
        begins = torch.ones(documents.shape, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts = begins.flatten().nonzero().flatten()
        batch[_STARTS] = torch.cat((starts, torch.tensor([documents.numel()]))).to(torch.int32)
    return batch


def documents_of(batch: dict[str, Tensor]) -> DocumentsOfRows | None:
    """Return the documents of a microbatch within which tokens attend; None where they attend to the whole sample."""
    documents = batch.get(_DOCUMENTS)
    return None if documents is None else DocumentsOfRows.of(documents, batch[_STARTS])
