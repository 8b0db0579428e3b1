"""Files with quantized tensors."""
