"""Megatron-Core's import path of the layer specs of hybrid models."""

from megatron.core.elsewhere import elsewhere

_INSTEAD = "GPTModel builds the layers of hybrid_layer_pattern itself; MambaLayer and TransformerLayer can be built without specs"

hybrid_stack_spec = elsewhere(__name__, "hybrid_stack_spec", _INSTEAD)
hybrid_inference_stack_spec = elsewhere(__name__, "hybrid_inference_stack_spec", _INSTEAD)

__all__ = ["hybrid_inference_stack_spec", "hybrid_stack_spec"]
