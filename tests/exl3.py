"""Folders as exllamav3 writes them, of any model and with random trellises."""

from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.site import sites


def random_layer(name: str, rows: int, width: int, bits: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The tensors of a layer whose sides are multiples of 128."""
    trellis = torch.randint(-(2**15), 2**15, (width // 16, rows // 16, 16 * bits), generator=generator)
    signs = [torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1 for size in (width, rows)]
    scales = [
        sign * torch.rand(len(sign), generator=generator) * scale for sign, scale in zip(signs, (0.05, 2), strict=True)
    ]
    own = {"trellis": trellis.short(), "suh": scales[0].half(), "svh": scales[1].half(), "mul1": torch.tensor(1)}
    return {f"{name}.{key}": tensor for key, tensor in own.items()}


def save_random(config: transformers.PreTrainedConfig, folder: Path, bits: int = 3) -> None:
    """A folder of a causal language model, all of whose layers but the router, experts too, have a trellis."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model, generator = transformers.AutoModelForCausalLM.from_config(config).half(), torch.Generator().manual_seed(1)
    tensors = {name: tensor for name, tensor in model.state_dict().items()}
    for name, site in sites(model).items():
        if site.kind is KbitProjection:
            experts, rows, width = tensors.pop(name).shape
            parent, _, own = name.rpartition(".")
            parts = ("gate_proj", "up_proj") if own == "gate_up_proj" else (own,)
            for expert in range(experts):
                for part in parts:
                    layer = f"{parent}.{expert}.{part}"
                    tensors |= random_layer(layer, rows // len(parts), width, bits, generator)
        elif isinstance(site.home, nn.Linear):
            del tensors[f"{name}.weight"]
            tensors |= random_layer(name, *site.shape, bits, generator)
    config.architectures, config.dtype = [type(model).__name__], torch.float16
    config.quantization_config = {"quant_method": "exl3", "version": "1.4.1", "bits": float(bits), "head_bits": bits}
    config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
