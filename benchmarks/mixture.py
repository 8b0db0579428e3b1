"""What calibrating gains a mixture of experts, on a CPU: a small one is trained for it.

    python benchmarks/mixture.py [--steps 600] [--bits 2,3] [--methods feedback,weighted]

A byte-level Mixtral of 2 million parameters, 3 layers with 16 experts of which two read a byte, is trained on the
sources of Python's library, but for one file in 16, which are held out. For each width and method a line says: the
error of what each block of experts gives on held-out text, over its size, and by how many nats per byte the loss is
above that in 16 bits. ``none`` is without data; ``experts without`` calibrates only what is not of experts.
"""

import argparse
import hashlib
import math
import sysconfig
import tempfile
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.utils import logging

import hf_kbit
from hf_kbit.calibration import rounding
from hf_kbit.calibration.solving import METHODS

BATCH, LENGTH, RATE = 8, 128, 2e-3
READ, HELD_OUT = 128, 256  # sequences to calibrate on, and to measure with
SHAPE = dict(vocab_size=256, hidden_size=128, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=2, num_local_experts=16, num_experts_per_tok=2, max_position_embeddings=LENGTH)


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 bytes to train on, and held-out ones."""
    root, parts = Path(sysconfig.get_paths()["stdlib"]), ([], [])
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if not {"site-packages", "dist-packages", "test", "tests"} & set(name.parts):
            parts[hashlib.sha256(name.as_posix().encode()).digest()[0] < 16].append(file.read_bytes())
    train, held_out = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train, held_out


def pieces(text: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    """int64 ``[number, 128]``, from anywhere in the text."""
    start = torch.randint(len(text) - LENGTH, (number, 1), generator=generator)
    return text[start + torch.arange(LENGTH)].long()


def train(text: torch.Tensor, steps: int, generator: torch.Generator) -> MixtralForCausalLM:
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SHAPE, bos_token_id=None, eos_token_id=None, pad_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    for step in range(steps):
        rate = min((step + 1) / (steps / 10), 0.51 + 0.49 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = RATE * rate
        ids = pieces(text, BATCH, generator)
        model(ids, labels=ids, output_router_logits=True).loss.backward()  # with what balances the experts
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.inference_mode()
def measured(model: MixtralForCausalLM, ids: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    """The loss on ``ids``, and what each block of experts gives."""
    given = [[] for _ in model.model.layers]
    hooks = [
        layer.mlp.experts.register_forward_hook(lambda _, args, output, own=own: own.append(output))
        for layer, own in zip(model.model.layers, given, strict=True)
    ]
    losses = [model(part, labels=part).loss.item() for part in ids.split(32)]
    for hook in hooks:
        hook.remove()
    return sum(losses) / len(losses), [torch.cat(own) for own in given]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--bits", default="2,3")
    parser.add_argument("--methods", default=",".join(METHODS))
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(0)
    text, other = texts()
    dense = train(text, arguments.steps, generator)
    read, held_out = pieces(text, READ, generator), pieces(other, HELD_OUT, generator)
    loss, expected = measured(dense, held_out)
    print(f"16 bits: loss {loss:.4f}")
    few = rounding.FEW
    with tempfile.TemporaryDirectory() as folder:
        dense.save_pretrained(folder)
        for bits in map(int, arguments.bits.split(",")):
            for method in ("none", "experts without", *arguments.methods.split(",")):
                if method == "none":
                    config = hf_kbit.KbitConfig(bits=bits)
                    model = MixtralForCausalLM.from_pretrained(folder, quantization_config=config)
                else:
                    rounding.FEW = math.inf if method == "experts without" else few
                    how = {} if method == "experts without" else {"method": method}
                    model = MixtralForCausalLM.from_pretrained(folder)
                    hf_kbit.calibrate(model, read, bits=bits, batch=32, **how)
                found_loss, found = measured(model.eval(), held_out)
                errors = [((x - y).norm() / y.norm()).item() for x, y in zip(found, expected, strict=True)]
                listed = ", ".join(f"{error:.3f}" for error in errors)
                print(f"{bits} bits, {method}: errors {listed}; loss +{found_loss - loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
