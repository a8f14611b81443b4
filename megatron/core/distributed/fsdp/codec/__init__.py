"""Codecs other than a cast: FP8 weights, and tensor subclasses with hooks. Importing this makes ``fully_shard`` take such parameters."""

from megatron.core.distributed.fsdp.buffers.weight_codec import register_parameter_kind
from megatron.core.distributed.fsdp.codec.fp8_codec import QuantizedParameters
from megatron.core.distributed.fsdp.codec.hooked_weights import HookedParameters

register_parameter_kind(QuantizedParameters())
register_parameter_kind(HookedParameters())
