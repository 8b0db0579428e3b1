"""Resizing the vocabulary of a model whose head is quantized: refused before anything is changed."""

from functools import wraps

from hf_kbit.nn.linear import KbitLinear


def refuse_quantized_head(resize_token_embeddings):
    """``resize_token_embeddings`` that says what it cannot do: rows of a packed head can be neither added nor cut."""

    @wraps(resize_token_embeddings)
    def wrapped(self, new_num_tokens=None, pad_to_multiple_of=None, *args, **kwargs):
        head = self.get_output_embeddings()
        changes = new_num_tokens is not None or pad_to_multiple_of is not None
        same = new_num_tokens in (None, getattr(head, "out_features", None)) and pad_to_multiple_of is None
        if isinstance(head, KbitLinear) and changes and not same:
            name = next(name for name, module in self.named_modules() if module is head)
            raise ValueError(
                f"{name}: found a head of {head.out_features} rows quantized to {head.bits} bits, expected one in 16 "
                f"bits to resize it to {new_num_tokens}: resize the model before it is quantized, or quantize it "
                "without its head"
            )
        return resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)

    return wrapped
