"""What of a model is quantized, and how."""
