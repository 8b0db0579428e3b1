"""A real model with a trellis, with and without data: how far its predictions are from those in 16 bits.

    python docs/lab/sketches/trellis_calibrated.py MODEL IDS [--bits 4,3,2] [--json FILE]

MODEL is a folder in 16 bits; IDS a file of safetensors with ``ids``, integers ``[rows, tokens]``, held out. On a GPU.
``docs/lab/2026-11-28-trellis-quantizing.md`` has the figures.
"""

import argparse
import json
import time
from functools import partial

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hf_kbit
from hf_kbit import KbitConfig
from hf_kbit.calibration.writing import write
from hf_kbit.nn.weight import packed_layers


def load(folder: str, **how):
    return AutoModelForCausalLM.from_pretrained(folder, device_map="cuda", dtype=torch.float32, **how).eval()


@torch.inference_mode()
def measured(model, ids, states, head, base) -> dict:
    divergences, losses = [], []
    for row, state in zip(ids, states, strict=True):
        logits = model(row[None]).logits[0]
        losses.append(F.cross_entropy(logits[:-1], row[1:], reduction="none"))
        for own, exact in zip(logits.split(256), state.split(256), strict=True):
            p, q = own.log_softmax(-1), (exact @ head.T).log_softmax(-1)
            divergences.append((q.exp() * (q - p)).sum(-1))
    kl, loss = torch.cat(divergences).double(), torch.cat(losses).double().mean()
    layers = packed_layers(model).values()
    stored = 8 * sum(layer.weight.nbytes_packed for layer in layers) / sum(layer.num_weights for layer in layers)
    found = {
        "kl": kl.mean(),
        "kl_error": kl.std() / len(kl) ** 0.5,
        "perplexity": loss.exp(),
        "over": (loss - base).expm1(),
    }
    return {"stored_bits": stored} | {name: value.item() for name, value in found.items()}


@torch.inference_mode()
def in_16_bits(model, ids) -> tuple:
    """What ``measured`` compares with: last states, the head, and the loss."""
    states, head = [model.model(row[None]).last_hidden_state[0] for row in ids], model.lm_head.weight.clone()
    losses = [F.cross_entropy(s[:-1] @ head.T, r[1:], reduction="none") for s, r in zip(states, ids, strict=True)]
    return states, head, torch.cat(losses).double().mean()


def report(ways: dict, arguments, ids, exact: tuple) -> None:
    """A line for each number of bits and each way to make a model of it."""
    for bits in map(int, arguments.bits.split(",")):
        for way, make in ways.items():
            start = time.perf_counter()
            quantized = make(bits)
            torch.cuda.synchronize()
            row = {"way": way, "bits": bits, "seconds": time.perf_counter() - start}
            row |= measured(quantized, ids, *exact)
            print(json.dumps(row), flush=True)
            if arguments.json:
                with open(arguments.json, "a") as file:
                    print(json.dumps(row), file=file)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("ids")
    parser.add_argument("--bits", default="4,3,2")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    ids = load_file(arguments.ids)["ids"].long().cuda()
    model = load(arguments.model)
    exact = in_16_bits(model, ids)
    own = write(model.bfloat16())
    del model

    def without_data(codebook: str, bits: int):
        return load(arguments.model, quantization_config=KbitConfig(bits=bits, codebook=codebook))

    def calibrated(bits: int):
        size = {"sequences": own.shape[0], "length": own.shape[1]}
        return hf_kbit.calibrate(load(arguments.model), own, bits=bits, codebook="trellis", **size)

    ways = {
        "scalar, no data": partial(without_data, "optimal"),
        "trellis, no data": partial(without_data, "trellis"),
        "trellis, own text": calibrated,
    }
    report(ways, arguments, ids, exact)


if __name__ == "__main__":
    main()
