"""Settings of FP8 weights reach the codecs that weights ask for, or are refused where there are no such weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.adapter.fully_sharded_data_parallel import follow_fp8_settings
from tests.support.float8_weights import make_codec


def _linear() -> nn.Linear:
    linear = nn.Linear(8, 8)
    setattr(linear.weight, "fsdp_codec", make_codec("tensorwise"))  # noqa: B010
    return linear


@pytest.mark.parametrize("keeps", [False, True])
def test_what_layers_derive_from_bytes_is_kept_if_asked(keeps: bool) -> None:
    linear = _linear()
    ddp_config = DistributedDataParallelConfig(fp8_param_gather=True, keep_fp8_transpose_cache=keeps)
    follow_fp8_settings(SimpleNamespace(fp8_param=True), ddp_config, linear)
    assert vars(linear.weight)["fsdp_codec"] == make_codec("tensorwise", keeps_derived=keeps)
    assert not hasattr(linear.bias, "fsdp_codec")


def test_a_model_without_fp8_weights_cannot_gather_them() -> None:
    """The setting would be ignored."""
    with pytest.raises(ValueError, match="must come with weights in FP8, got a TransformerConfig with fp8_param=False"):
        follow_fp8_settings(
            SimpleNamespace(fp8_param=False), DistributedDataParallelConfig(fp8_param_gather=True), _linear()
        )
