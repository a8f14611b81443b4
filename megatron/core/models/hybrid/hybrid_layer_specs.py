"""Megatron-Core's import path of the specs of such models' layers."""

from megatron.core.elsewhere import elsewhere

_INSTEAD = "GPTModel makes the layers of hybrid_layer_pattern by itself; MambaLayer and TransformerLayer can be built without specs"

hybrid_stack_spec = elsewhere(__name__, "hybrid_stack_spec", _INSTEAD)
hybrid_inference_stack_spec = elsewhere(__name__, "hybrid_inference_stack_spec", _INSTEAD)

__all__ = ["hybrid_inference_stack_spec", "hybrid_stack_spec"]
