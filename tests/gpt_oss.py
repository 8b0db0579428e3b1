"""A tiny GPT-OSS whose checkpoint has its experts in MXFP4, as openai/gpt-oss-20b is published."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM


def save(folder: Path, experts: int, hidden: int, inner: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Writes it, in bfloat16: all 16 codes, and scales of 18 octaves. The shapes of scales of each projection.

    Its numbers are made from whole numbers: no generator of random ones has to stay as it is.
    """
    config = GptOssConfig(
        vocab_size=96,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    model = GptOssForCausalLM(config).bfloat16()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_((_numbers(parameter.shape, number) - 2049) / 2**13)
    model.save_pretrained(folder)
    tensors, shapes = load_file(folder / "model.safetensors"), {}
    for number, name in enumerate(sorted(name for name in tensors if name.endswith(("gate_up_proj", "down_proj")))):
        count, in_features, out_features = tensors.pop(name).shape
        shape = shapes[name] = count, out_features, in_features // 32
        tensors[f"{name}_blocks"] = (_numbers((*shape, 16), number) % 256).byte()
        scales = (118 + _numbers(shape, number) % 7).byte()
        scales[0, 0, 0], scales[0, 1, 0] = 124, 124 - 17
        tensors[f"{name}_scales"] = scales
    write(folder, tensors)
    return shapes


def _numbers(shape: tuple[int, ...], number: int) -> torch.Tensor:
    """From 0 to 4098, of another order for another number."""
    return (torch.arange(math.prod(shape)) * (2 * number + 7) ** 3 % 4099).view(shape)


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Beside a ``config.json`` that is there, and then says that the tensors are MXFP4."""
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    (folder / "config.json").write_text(json.dumps(config))
