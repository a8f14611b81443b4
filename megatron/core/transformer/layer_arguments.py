"""Arguments of Megatron-Core's layers that ours take at the values that change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.served_arguments import ANY, Served, check_arguments

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_SERVED: Served = {
    "vp_stage": (ANY, "layer numbers are those of the whole model"),
    "is_mtp_layer": (ANY, "such layers compute as others do"),
    "add_layer_offset": (ANY, "layer numbers are those of the whole model"),
    "pp_layer_offset": ((None, 0), "layer numbers are those of the whole model"),
    "name": (ANY, "a name of a layer chooses nothing"),
}


def check_layer_arguments(owner: str, **given: Any) -> None:
    """Refuse values that are not served.

    Raises:
        NotImplementedError: names the argument and says why.
    """
    check_arguments(owner, given, _SERVED)


def check_cp_comm_type(config: TransformerConfig, cp_comm_type: str | None) -> None:
    """Refuse another way of exchanging keys and values than the configuration's.

    Raises:
        ValueError: they differ.
    """
    of_config = config.cp_comm_type
    allowed = of_config if isinstance(of_config, list | tuple) else [of_config]
    if cp_comm_type is not None and cp_comm_type not in allowed:
        raise ValueError(f"cp_comm_type must be that of the configuration, {of_config!r}, got {cp_comm_type!r}")
