"""``trainable_token_indices`` of PEFT on packed tables: a few rows that are trained, as floats, over packed ones.

PEFT puts the trained rows into a copy of the table in each step. Here rows are looked up in the packed table, and
those of trained tokens replaced; of a head that is tied to the table, their logits.
"""

import functools

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import nn
from torch.nn import functional as F

from hf_kbit.integrations.peft.layer import ADAPTED, KbitTunerLayer, Over, base_layer_as, plain_layer
from hf_kbit.nn.embedding import KbitEmbedding


class KbitTrainableTokens(KbitTunerLayer, TrainableTokensLayer):
    """What PEFT has over a table, or the head that is tied to it, over a packed one."""

    def forward_adapters(self, x: torch.Tensor, active_adapters, *args, **kwargs) -> torch.Tensor:
        if self.quantized is None:
            return super().forward_adapters(x, active_adapters, *args, **kwargs)
        if self.disable_adapters and self.merged:
            self.unmerge()
        result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        self._check_overlapping_tokens(active_adapters)
        for name in active_adapters:
            tokens = torch.tensor(self.token_indices[name], device=result.device)
            rows = self.trainable_tokens_delta[name].to(result)
            replace = self._replace_rows if isinstance(self.base_layer, KbitEmbedding) else self._replace_logits
            result = replace(result, x, tokens, rows)
        return result

    def _replace_rows(self, found: torch.Tensor, ids: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor):
        """``found`` ``[*, K]`` with ``rows`` ``[n, K]`` where ``ids`` ``[*]`` are among ``tokens`` ``[n]``."""
        scale = self._get_embed_scale()
        rows = rows if scale is None else rows * scale.to(rows)
        places = torch.full((self.base_layer.num_embeddings,), -1, device=ids.device)
        places[tokens] = torch.arange(len(tokens), device=ids.device)
        place = places[ids]
        return torch.where((place >= 0)[..., None], rows[place.clamp(min=0)], found)

    def _replace_logits(self, found: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor):
        """``found`` ``[*, N]`` with those of ``x`` ``[*, K]`` times ``rows`` ``[n, K]`` at ``tokens`` ``[n]``."""
        bias = self.base_layer.bias
        return found.index_copy(-1, tokens, F.linear(x.to(rows), rows, None if bias is None else bias[tokens]))

    def get_merged_weights(self, active_adapters) -> torch.Tensor:
        """The decoded table with the trained rows, for models that ask for it."""
        packed, get = self.quantized, super().get_merged_weights
        if packed is None:
            return get(active_adapters)
        return get.__func__(Over(self, plain_layer(packed, packed.dequantize())), active_adapters)

    __reduce_ex__ = object.__reduce_ex__  # pickle finds this class by its name


def wrap_update_layer(update_layer):
    """``TrainableTokensLayer.update_layer`` that takes the rows to train from the decoded table."""

    @functools.wraps(update_layer)
    def wrapped(self, adapter_name, *args, **kwargs):
        packed = self.get_base_layer()
        if not isinstance(packed, ADAPTED):
            return update_layer(self, adapter_name, *args, **kwargs)
        what = f"trainable_token_indices of a {type(packed).__name__} of {packed.bits} bits"
        if packed is not self.base_layer:
            raise ValueError(f"{what}: found it in target_modules too, expected one of both")
        if packed.weight.is_meta:
            raise ValueError(
                f"{what}: found it offloaded, expected it on a device: its rows are where training starts"
            )
        self.__class__ = KbitTrainableTokens
        if kwargs.get("tied_adapter") is not None:  # whose rows it shares
            return update_layer(self, adapter_name, *args, **kwargs)
        with base_layer_as(self, plain_layer(packed, packed.dequantize())):
            return update_layer(self, adapter_name, *args, **kwargs)

    return wrapped


def name_layers(model: nn.Module) -> None:
    """Tells layers what they are called, for errors and reports."""
    for name, module in model.named_modules():
        if isinstance(module, KbitTrainableTokens):
            module.name = name.removesuffix(".token_adapter")
