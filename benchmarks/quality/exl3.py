"""EXL3, by exllamav3's converter, which quantizes a folder on a GPU (https://github.com/turboderp-org/exllamav3)."""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.quality.methods import Method, Storage, linears, load

PARTS = ("trellis", "suh", "svh", "mul1")  # codes, scales of inputs and of outputs, and which levels


def load_exl3(folder: Path, device: str, bits: int) -> nn.Module:
    """Calibrated on its own text. The converter is shown the model and its tokenizer alone: it reads all it is shown.

    Its layers are decoded one by one from the file that it writes, so that no layer is missed: an error tells of one.
    """
    from exllamav3.modules.quant.exl3 import LinearEXL3

    with tempfile.TemporaryDirectory() as temporary:
        source, work, target = (Path(temporary) / name for name in ("source", "work", "target"))
        source.mkdir()
        for file in (*folder.glob("*.json"), *folder.glob("model*.safetensors")):
            (source / file.name).symlink_to(file.resolve())
        command = [sys.executable, "-m", "exllamav3.conversion.convert_model", "-i", source, "-w", work, "-o", target]
        subprocess.run([*command, "-b", str(bits), "-hb", "16"], check=True)
        converted = load_file(target / "model.safetensors", device)
    model, sizes = load(folder, device), []
    for name, layer in linears(model).items():
        parts = {part: converted[f"{name}.{part}"] for part in PARTS}
        made = LinearEXL3(None, layer.in_features, layer.out_features, None, out_dtype=torch.float16, **parts)
        layer.weight.data = made.get_weight_tensor().T.to(layer.weight.dtype).contiguous()
        codes, *others = (part.nbytes for part in parts.values())
        sizes.append((layer.weight.numel(), codes, sum(others)))
    model.exl3_sizes = sizes
    return model


def exl3_storage(model: nn.Module) -> Storage:
    """Of the file; its layers hold decoded weights."""
    count, codes, others = (sum(each) for each in zip(*model.exl3_sizes, strict=True))
    return Storage(count, codes, others, 8 * codes / count)


def exl3_methods() -> list[Method]:
    return [
        Method("exllamav3", bits, "EXL3", partial(load_exl3, bits=bits), exl3_storage, "decoded weights, torch")
        for bits in (2, 3, 4)
    ]
