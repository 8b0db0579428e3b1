"""Attention of one token to a cache, in sums of products of which Inductor makes three kernels.

``scaled_dot_product_attention`` has no kernel for a mask and heads that share keys: Transformers copies the keys and
values for each head first, and the kernel then has as many blocks as there are heads, each of which goes through all
keys alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "hf_kbit_one_token"
_alone = Lock()  # of two threads with one model the second would take what the first has put there for its own


def attend(module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings):
    """What Transformers calls for attention, where a model runs ``of_one_token``. ``sdpa`` does what is not of one
    token with a mask, and what is not compiled, for which these products would each be written to memory.

    Args:
        module: the layer.
        query: ``[batch, heads, 1, size]``.
        key: ``[batch, heads that keys have, length, size]``.
        value: likewise.
        attention_mask: bool ``[batch, 1, 1, length]``, what there is to attend to.
        settings: ``scaling`` of the products; with a ``position_bias``, a ``softcap`` or ``dropout`` ``sdpa`` does it.

    Returns:
        ``[batch, 1, heads, size]`` in the dtype of ``query``, computed in float32, and no weights.
    """
    masked = attention_mask is not None and attention_mask.dtype == torch.bool
    plain = settings.get("position_bias") is None and settings.get("softcap") is None and not settings.get("dropout")
    if query.shape[2] != 1 or not masked or not plain or not torch.compiler.is_compiling():
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    batch, heads, _, size = query.shape
    scaling = settings.get("scaling")
    scaling = size**-0.5 if scaling is None else scaling
    grouped = (query.float() * scaling).view(batch, key.shape[1], -1, 1, size)
    scores = (grouped * key[:, :, None]).sum(-1)
    weights = scores.masked_fill(~attention_mask, -torch.inf).softmax(-1)
    attended = (weights[..., None] * value[:, :, None]).sum(3)
    return attended.view(batch, 1, heads, value.shape[3]).to(query.dtype), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def of_one_token(model) -> Iterator[None]:
    """Inside, a model that has ``sdpa`` calls ``attend`` instead."""
    config = model.config.get_text_config(decoder=True)
    with _alone:
        before = config._attn_implementation
        if before == "sdpa":
            config._attn_implementation_internal = NAME  # the property would change sub-configs too
        try:
            yield
        finally:
            config._attn_implementation_internal = before
