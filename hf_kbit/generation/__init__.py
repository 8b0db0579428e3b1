"""``hf_kbit.fast_generate``: generating without waiting for the host, with quantized models and others."""
