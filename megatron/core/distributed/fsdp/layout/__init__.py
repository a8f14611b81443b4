"""Where tensors and buffers lie: pure geometry, computed from shapes and sizes alone, so that all ranks agree."""
