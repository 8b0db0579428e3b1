"""Resizing the vocabulary of a model whose head or table is quantized: refused before anything is changed."""

from functools import wraps

from hf_kbit.nn.weight import KbitWeight


def refuse_quantized_head(resize_token_embeddings):
    """``resize_token_embeddings`` that says what it cannot do: packed rows can be neither added nor cut."""

    @wraps(resize_token_embeddings)
    def wrapped(self, new_num_tokens=None, pad_to_multiple_of=None, *args, **kwargs):
        kinds = {"head": self.get_output_embeddings(), "table": self.get_input_embeddings()}
        changes = new_num_tokens is not None or pad_to_multiple_of is not None
        for kind, layer in kinds.items():
            same = new_num_tokens in (None, getattr(layer, "out_features", None)) and pad_to_multiple_of is None
            if isinstance(layer, KbitWeight) and changes and not same:
                name = next(name for name, module in self.named_modules() if module is layer)
                raise ValueError(
                    f"{name}: found a {kind} of {layer.out_features} rows quantized to {layer.bits} bits, expected "
                    f"one in 16 bits to resize it to {new_num_tokens}: resize the model before it is quantized, or "
                    f"quantize it without its {kind}"
                )
        return resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)

    return wrapped
