"""Where tensors and buffers lie. Pure geometry: no tensor is touched and no rank is asked."""
