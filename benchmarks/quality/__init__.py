"""What quantization costs a language model: ``data`` finds text, ``train`` makes the model, ``measure`` measures."""
