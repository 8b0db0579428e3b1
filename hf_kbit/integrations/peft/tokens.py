"""``trainable_token_indices`` of PEFT on packed tables: a few rows that are trained, as floats, over packed ones.

PEFT puts the trained rows into a copy of the table in each step. Here rows are looked up in the packed table, and
those of trained tokens replaced; of a head that is tied to the table, their logits.
"""

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch.nn import functional as F

from hf_kbit.integrations.peft.layer import KbitTunerLayer
from hf_kbit.nn.embedding import KbitEmbedding


class KbitTrainableTokens(KbitTunerLayer, TrainableTokensLayer):
    """What PEFT has over a table, or the head that is tied to it, over a packed one."""

    def forward_adapters(self, x: torch.Tensor, active_adapters, *args, **kwargs) -> torch.Tensor:
        if self.quantized is None or self.disable_adapters or self.merged:
            return super().forward_adapters(x, active_adapters, *args, **kwargs)
        self._check_overlapping_tokens(active_adapters)
        result = self.base_layer(x, *args, **kwargs)
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

    def check(self) -> None:
        """Raises if there are no rows of a table to start from."""
        if self.base_layer.weight.is_meta:
            raise ValueError(
                f"{self.name}: found it offloaded, expected it on a device: rows to train start from its own"
            )

    __reduce_ex__ = object.__reduce_ex__  # pickle finds this class by its name
