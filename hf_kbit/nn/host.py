"""Tables of embeddings that stay in the memory of the host: a GPU reads the rows that it looks up, and no others.

CUDA gives memory that is registered with it an address on the GPU. So such a table is a tensor of the GPU that takes
none of its memory; kernels read it as any other, in CUDA graphs too, and what they read comes over the bus.
"""

import weakref
from collections import Counter

import torch
from torch import nn

from hf_kbit.nn.weight import as_parameter
from hf_kbit.weight.tensor import KbitTensor


class _Registered:
    """A copy of a tensor's bytes on the host, which a GPU can read."""

    def __init__(self, tensor: torch.Tensor, device: torch.device):
        self._bytes = tensor.detach().to("cpu", copy=True).contiguous().flatten().view(torch.uint8)
        with torch.cuda.device(device):
            where = self._bytes.data_ptr(), self._bytes.nbytes
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(*where, 0))
        # Not when the process ends, as CUDA may have ended before.
        weakref.finalize(self, _forget, self._bytes).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict:
        where = self._bytes.data_ptr(), False
        return {"version": 2, "shape": self._bytes.shape, "typestr": "|u1", "data": where}


def _forget(registered: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(registered.data_ptr())


def on_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The numbers of a tensor as one of a GPU whose memory is the host's."""
    held = torch.as_tensor(_Registered(tensor, device), device=device)  # which keeps what it is of
    return held.view(tensor.dtype).view(tensor.shape)


def tables(model: nn.Module) -> dict[str, nn.Embedding]:
    """Tables by their names, packed or not, but for those whose weight another layer has too, such as a head."""
    users = Counter(id(x) for module in model.modules() for x in module._parameters.values() if x is not None)
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return {name: table for name, table in found.items() if users[id(table._parameters["weight"])] == 1}


def keep_on_host(table: nn.Embedding, device: torch.device) -> None:
    """Has a table, wherever it is, keep its numbers on the host and compute on a GPU. It is frozen."""
    weight = table.weight
    if isinstance(weight, KbitTensor):
        table.weight = as_parameter(weight.as_stored().each(lambda tensor: on_host(tensor, device)))
    else:
        table.weight = nn.Parameter(on_host(weight, device), requires_grad=False)
