"""``hf_kbit.decode``: decoding that does not wait for the host, for quantized models and for others."""
