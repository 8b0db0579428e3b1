"""Attention of one token to a cache on a GPU, where ``scaled_dot_product_attention`` would copy shared keys for each
head first. It has a place in Transformers' tables of attention functions."""

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "hf_kbit_one_token"


def attend(module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings):
    """The attention function for ``NAME``; ``sdpa`` does what is not of one token with a mask, or sets more than
    ``scaling``. ``query`` ``[batch, heads, 1, size]``, ``key`` and ``value`` ``[batch, heads that have keys, length,
    size]`` and a bool mask ``[batch, 1, 1, length]`` make ``[batch, 1, heads, size]``, computed in float32, and no
    weights."""
    masked = attention_mask is not None and attention_mask.dtype == torch.bool
    plain = settings.get("position_bias") is None and settings.get("softcap") is None and not settings.get("dropout")
    if query.shape[2] != 1 or not masked or not plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    scaling = settings.get("scaling")
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    return attend_one_token(query, key, value, attention_mask, scaling), None


@torch.library.custom_op("hf_kbit::attend_one_token", mutates_args=())
def attend_one_token(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """The op of ``attend``, of tensors of any strides."""
    from hf_kbit.generation import attention_kernels  # Triton is where PyTorch compiles for a GPU

    return attention_kernels.attend(query, key, value, mask, scaling)


@attend_one_token.register_fake
def _(query, key, value, mask, scaling):
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
