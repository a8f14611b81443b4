"""Between which ranks parameters are sharded, and between which the model is split besides."""
