"""Samples of different lengths, packed one after the other into one sequence: attention and positions stay within each.

Shapes: t tokens of the pack, n samples, b rows of a batch, s tokens of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass
class PackedSeqParams:
    """Where the samples of a pack begin, for ``GPTModel.forward`` and the modules in it; the pack is a batch [1, t].

    Fields, order and defaults are Megatron-Core's.

    Attributes:
        qkv_format: "thd" for a pack; "sbhd" for a batch without packing.
        cu_seqlens_q: [n + 1] number of tokens before each sample, and of all; tokens behind them are a further sample.
        cu_seqlens_kv: the same; others are refused.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: [n + 1] the same with padding behind each sample; where they are given they
            say where samples begin. What attention gives for padding is to be masked in the loss.
        max_seqlen_q, max_seqlen_kv: tokens of the longest sample, which kernels on CUDA ask for.
        total_tokens: t; if it is given, ``seq_idx`` is made.
        seq_idx: [1, t] index of each token's sample.
        local_cp_size, cp_group: must be None or of one rank: packs are not split over context-parallel ranks.
        tokens_per_sample, pad_between_seqs, cp_scatter_cache: accepted; nothing here reads them.
    """

    qkv_format: str | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    local_cp_size: int | None = None
    cp_group: ProcessGroup | None = None
    total_tokens: int | None = None
    seq_idx: Tensor | None = None
    tokens_per_sample: int | None = None
    pad_between_seqs: bool | None = None
    cp_scatter_cache: object = None
    resets_positions: ClassVar[bool] = True
    """Whether rotary positions begin anew in each sample."""

    def __post_init__(self) -> None:
        self._masks: dict[tuple[int, torch.device], Tensor] = {}
        self._covering: dict[tuple[int, torch.device], tuple[Tensor, int]] = {}
        if self.total_tokens is not None and self.starts_or_none() is not None and self.seq_idx is None:
            self.seq_idx = self.samples(self.total_tokens)[None].to(torch.int32)

    def starts_or_none(self) -> Tensor | None:
        """Return [n + 1] where samples begin in memory, and where the last ends; None where nothing says so."""
        starts = self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded
        return None if starts is None else starts.reshape(-1)

    @property
    def is_packed(self) -> bool:
        """Whether there are samples to keep apart.

        Raises:
            ValueError: the format is unknown, or "thd" comes without ``cu_seqlens_q``.
            NotImplementedError: the pack is split over context-parallel ranks, or keys are of other samples than queries.
        """
        if self.qkv_format in ("sbhd", "bshd"):
            return False
        if self.qkv_format not in ("thd", None):
            raise ValueError(f"PackedSeqParams.qkv_format must be 'thd' or 'sbhd', got {self.qkv_format!r}")
        if (self.local_cp_size or 1) > 1 or (self.cp_group is not None and self.cp_group.size() > 1):
            raise NotImplementedError(
                "a pack must not be split over context-parallel ranks; use context_parallel_size 1"
            )
        if self.cu_seqlens_q is None:
            if self.qkv_format == "thd":
                raise ValueError("PackedSeqParams.cu_seqlens_q must be given with qkv_format 'thd', got None")
            return False
        if self.cu_seqlens_kv is not None and self.cu_seqlens_kv.shape != self.cu_seqlens_q.shape:
            raise NotImplementedError(
                "cu_seqlens_kv must be cu_seqlens_q in self-attention, got "
                f"{list(self.cu_seqlens_kv.shape)} and {list(self.cu_seqlens_q.shape)} entries"
            )
        return True

    def samples(self, num_tokens: int) -> Tensor:
        """Return the index [t] of each token's sample; tokens behind the last sample have the next index."""
        starts = self.starts_or_none()
        assert starts is not None
        tokens = torch.arange(num_tokens, device=starts.device, dtype=starts.dtype)
        return torch.searchsorted(starts[1:].contiguous(), tokens, right=True)

    def positions(self, num_tokens: int) -> Tensor:
        """Return the position [t] of each token in its own sample."""
        starts = self.starts_or_none()
        assert starts is not None
        return torch.arange(num_tokens, device=starts.device) - starts.to(torch.int64)[self.samples(num_tokens)]

    def covering(self, num_tokens: int, device: torch.device) -> tuple[Tensor, int]:
        """Return where samples begin and the last ends, int32 on a device, such that they cover all tokens, and the longest's length.

        Kernels leave memory as it was where no sample is, forward and backward; so what lies behind the last is one more. The
        first call for a pack waits for the device, to which later ones need not come.

        Raises:
            ValueError: the numbers do not grow from 0 to at most ``num_tokens``.
        """
        key = (num_tokens, device)
        if key not in self._covering:
            given = self.starts_or_none()
            assert given is not None
            starts = given.tolist()
            if not starts or starts[0] != 0 or starts != sorted(starts) or starts[-1] > num_tokens:
                raise ValueError(
                    f"cu_seqlens must grow from 0 to at most the {num_tokens} tokens of the pack, got {starts[:8]}"
                    f"{' ...' if len(starts) > 8 else ''}"
                )
            starts += [num_tokens] if starts[-1] < num_tokens else []
            longest = max((end - begin for begin, end in itertools.pairwise(starts)), default=0)
            self._covering[key] = torch.tensor(starts, dtype=torch.int32, device=device), longest
        return self._covering[key]

    def causal_mask(self, num_tokens: int) -> Tensor:
        """Return the mask [1, 1, t, t], bool, True where a key is of another sample or comes after its query; made once."""
        starts = self.starts_or_none()
        assert starts is not None
        key = (num_tokens, starts.device)
        if key not in self._masks:
            samples = self.samples(num_tokens)
            others = samples[:, None] != samples[None, :]
            self._masks[key] = others.logical_or_(torch.ones_like(others).triu_(diagonal=1))[None, None]
        return self._masks[key]


class DocumentsOfRows(PackedSeqParams):
    """Documents within the rows of a batch [b, s]: tokens attend within their own, and positions go on.

    Rotary positions say how far tokens are apart, so within a document it does not matter where they begin.

    Attributes:
        documents: [b, s] index of each token's document in its row.
        cu_seqlens_q: [m + 1] where documents begin, counted over the rows one after the other, and the number of all tokens.
    """

    documents: Tensor
    resets_positions = False
    _pack: PackedSeqParams | None = None

    @classmethod
    def of(cls, documents: Tensor, starts: Tensor) -> DocumentsOfRows:
        """Describe a batch; ``starts`` are int32, and no read of the device is needed."""
        length = documents.shape[1]
        made = cls("thd", starts, starts, max_seqlen_q=length, max_seqlen_kv=length)
        made.documents = documents
        return made

    def as_pack(self) -> PackedSeqParams:
        """Return the same for all rows one after the other, [1, b * s]; made once, and without a read of the device."""
        if self._pack is None:
            starts, length = self.cu_seqlens_q, self.max_seqlen_q
            assert starts is not None and length is not None
            self._pack = PackedSeqParams("thd", starts, starts, max_seqlen_q=length, max_seqlen_kv=length)
            self._pack._covering[self.documents.numel(), starts.device] = starts, length
        return self._pack

    def mask(self) -> Tensor:
        """Return the mask [b, 1, s, s], bool, True where a key is of another document or comes after its query; made once."""
        key = (self.documents.shape[1], self.documents.device)
        if key not in self._masks:
            others = self.documents[:, :, None] != self.documents[:, None, :]
            self._masks[key] = others.logical_or_(torch.ones_like(others).triu_(diagonal=1))[:, None]
        return self._masks[key]

    def ends(self) -> Tensor:
        """Return whether tokens [b, s - 1], all but the last of each row, end their document."""
        return self.documents[:, 1:] != self.documents[:, :-1]

    @staticmethod
    def packed(x: Tensor) -> Tensor:
        """Put the rows of heads one after the other: [s, b, n, d] -> [b * s, 1, n, d]."""
        return rearrange(x, "s b n d -> (b s) 1 n d")

    def unpacked(self, context: Tensor) -> Tensor:
        """Undo ``packed`` for the context: [b * s, 1, n * d] -> [s, b, n * d]."""
        return rearrange(context, "(b s) 1 d -> s b d", b=len(self.documents))


def check_pack(packed: PackedSeqParams, num_rows: int, *, cp_size: int = 1) -> None:
    """Check that a pack can be computed.

    Raises:
        ValueError: the batch has several rows.
        NotImplementedError: sequences are split over context-parallel ranks.
    """
    if num_rows != 1:
        raise ValueError(
            f"a pack must be a batch of one row, got {num_rows}; see megatron.core.utils.flatten_batch_for_packed_sequences"
        )
    if cp_size > 1:
        raise NotImplementedError(
            f"packed samples must not be split over context-parallel ranks, got {cp_size}; use context_parallel_size 1"
        )


_ROWS = ("tokens", "labels", "loss_mask", "position_ids")


def flatten_batch_for_packed_sequences(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a batch of b packs into one pack: rows [b, s] become [1, b * s], and ``cu_seqlens`` [b, n + 1] one list [1, m + 1].

    Entries of ``cu_seqlens`` behind the first that is s are padding of the list.
    """
    flat, given = dict(batch), batch.get("cu_seqlens")
    if given is None:
        return flat
    lengths = [flat[name].shape[1] for name in _ROWS if flat.get(name) is not None]
    length = lengths[0] if lengths else int(given[0, -1])
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        if flat.get(name) is not None:
            flat[name] = _one_list(flat[name], length)[None]
    if flat.get("max_seqlen") is not None:
        flat["max_seqlen"] = flat["max_seqlen"].max()[None]
    for name in _ROWS:
        if flat.get(name) is not None:
            flat[name] = flat[name].reshape(1, -1)
    return flat


def _one_list(rows: Tensor, length: int) -> Tensor:
    parts = []
    for index, row in enumerate(rows):
        ends = (row == length).nonzero()
        own = row if len(ends) == 0 else row[: int(ends[0]) + 1]
        parts.append(own if index == 0 else own[1:] + index * length)
    return torch.cat(parts)
