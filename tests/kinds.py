"""Kinds of models, as small as they can be, and what each is: the rows of ``test_lifecycle.py``."""

import copy
import functools
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import TestCase

import adapters
import cases
import torch
import transformers
from architectures import ARCHITECTURES, BY_NAME, Architecture, text
from torch import nn
from transformers import PreTrainedModel

from hf_kbit import KbitConfig
from hf_kbit.weight.packing import quantize_weight
from hf_kbit.weight.tensor import KbitTensor


@dataclass(frozen=True)
class Kind:
    """One row.

    Attributes:
        build: makes the float model, the same each time.
        config: what ``KbitConfig`` is given.
        inputs: makes the arguments of a forward pass.
        lora: where LoRA goes.
        tied: names of parameters that are one packed weight, each with the one that it is; as many as there are.
        change: what is done to the model after it was quantized.
        row: of the table of architectures.
    """

    build: Callable[[], PreTrainedModel]
    config: dict
    inputs: Callable[[], dict]
    lora: dict
    tied: dict[str, str] = field(default_factory=dict)
    change: Callable[[nn.Module], object] = lambda model: None
    row: Architecture | None = None


def row(name: str, *targets: str, dtype=torch.float32, settings=None, lora=None, tied=None, change=None, **config):
    """A kind of the table of architectures, with LoRA on these layers."""
    row = BY_NAME[name]
    lora = {"target_modules": list(targets or ("q_proj", "v_proj", "down_proj")), **(lora or {})}
    how = {"lora": lora, "tied": tied or {}, "change": change or (lambda model: None), "row": row}
    return Kind(functools.partial(row.build, dtype, **(settings or {})), config, row.inputs, **how)


def mixture(name: str, dtype=torch.float32, **config) -> Kind:
    """Of ``adapters.MIXTURES``, with LoRA on all projections of its experts."""
    found = adapters.lora_on_experts(name)
    lora = {"target_parameters": list(found.target_parameters), "target_modules": ["q_proj"]}
    return Kind(lambda: copy.deepcopy(adapters.dense(name, dtype)).eval(), config, text, lora)


def granite() -> PreTrainedModel:
    """Its experts have other names in a checkpoint, and nothing else there is another."""
    torch.manual_seed(0)
    model = transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**adapters.LOCAL)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    return model


class Attention(nn.Module):
    """Nobody's module: it has tied weights, a layer in two places, and buffers of all kinds."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.embed = nn.Embedding(80, width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.again = self.proj
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 80, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(()))
        self.register_buffer("mask", torch.rand(5, 5).tril(), persistent=False)
        self.register_buffer("top", self.mask[:2], persistent=False)

    def forward(self, ids):
        q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
        x = self.again(self.proj((q @ k.mT * self.scale * self.mask) @ v))
        return self.head(self.norm(x.mT).mT) + self.top.sum()


def make_layers_differ(model: nn.Module) -> None:
    """In levels, which hf_kbit 0.1.0 refined where the codebook was "layer"; and one in its transform, as merging and
    calibration may make it."""
    cases.give_own_levels(model)
    odd = model.model.layers[0].mlp.up_proj
    odd.load(quantize_weight(odd.dequantize(), odd.decoding.levels, search=True, transform="none"))


TIED = {"lm_head.weight": "model.embed_tokens.weight"}
WTE = {"lm_head.weight": "transformer.wte.weight"}
DECODED = {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"}
SHARED = {f"{name}.weight": "shared.weight" for name in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")}
WORDS = {"lm_head.weight": "transformer.word_embeddings.weight"}
PROJ_OUT = {"proj_out.weight": "model.decoder.embed_tokens.weight"}
POSITIONS = {"lm_head.weight": "model.decoder.embed_tokens.weight"}
KINDS = {
    "mixed widths": row(
        "llama", bits=3, module_bits={"down_proj": 5, r"self_attn.[qk]_proj": 2, "layers.0.mlp": None}
    ),
    "bfloat16": row("llama", dtype=torch.bfloat16, bits=2, codebook=[3.0, -1.0, 0.5, -4.0]),
    "version 1": row("llama", dtype=torch.float16, bits=3, codebook="normal_float", scale="absmax", transform="none"),
    "tied": row("llama", tied=TIED, settings={"tie_word_embeddings": True}, bits=4, embedding_bits=5),
    "packed head": row("llama", bits=4, embedding_bits=3, module_bits={"lm_head": 2}),
    "layers that differ": row("llama", bits=3, module_bits={"down_proj": 2}, change=make_layers_differ),
    "8-bit inputs": row("llama", bits=4, inputs="int8"),
    "Conv1D": row("gpt2", "c_attn", "c_fc", lora={"fan_in_fan_out": True}, tied=WTE, bits=3, embedding_bits=5),
    "encoder": row("bert-masked", "query", "value", tied=DECODED, bits=4, embedding_bits=5),
    "encoder and decoder": row("t5", "q", "wi_0", dtype=torch.bfloat16, tied=SHARED, bits=4, embedding_bits=5),
    "table of positions": row("opt", "q_proj", "fc1", tied=POSITIONS, bits=4, embedding_bits=5),
    "experts": mixture("qwen3_moe", bits=3, embedding_bits=4, module_bits={"layers.0.mlp.experts.down_proj": None}),
    "experts, transposed, with bias": mixture("gpt_oss", bits=4),
    "experts without a gate": mixture("nemotron_h", bits=5),
    "experts, renamed": Kind(granite, {"bits": 3}, text, mixture("mixtral").lora),
    "trellis": row(
        "llama",
        tied=TIED,
        settings={"tie_word_embeddings": True},
        bits=3,
        embedding_bits=5,
        codebook="trellis",
        module_bits={"down_proj": 8, "self_attn.q_proj": 1, "layers.0.mlp": None},
    ),
    "experts with a trellis": mixture(
        "qwen3_moe",
        dtype=torch.bfloat16,
        bits=5,
        codebook="trellis",
        module_bits={"layers.1.mlp": None, r"self_attn.[vo]_proj": None},
    ),
    "scaled table": row("gemma3", tied=TIED, bits=4, embedding_bits=5),
    "speech": row("whisper", "q_proj", "fc1", tied=PROJ_OUT, bits=4, embedding_bits=5),
    "layers of its own class": row("falcon", "query_key_value", tied=WORDS, bits=5, embedding_bits=5),
}
# What is in the table of architectures, as its rows say.
ROWS = {
    f"{each}, {dtype}": row(each.name, dtype=getattr(torch, dtype), bits=each.bits)
    for each in ARCHITECTURES
    for dtype in each.dtypes
}


class Life:
    """A model of a kind, quantized while it loaded from ``folder / "dense"``, of which ``log`` speaks, and saved in
    ``folder / "saved"``."""

    def __init__(self, kind: Kind, folder: Path):
        self.kind, self.folder, self.inputs = kind, folder, kind.inputs()
        dense = kind.build()
        self.cls = type(dense)
        dense.save_pretrained(folder / "dense")
        with logged() as log:
            self.model = self.load("dense", quantization_config=KbitConfig(**kind.config))
        self.log = log.records
        kind.change(self.model)
        self.model.save_pretrained(folder / "saved")
        self.expected = run(self.model, self.inputs)

    def load(self, place="saved", **how) -> PreTrainedModel:
        return self.cls.from_pretrained(self.folder / place, **how)

    def fresh(self) -> PreTrainedModel:
        """The quantized model, to be changed."""
        return copy.deepcopy(self.model)

    def assert_same(self, model: nn.Module, step: str) -> None:
        """That it is the model to the last bit: all tensors, what is one weight, and outputs."""
        same_tensors(model, self.model, step)
        assert_tied(model, self.kind)
        same_outputs(run(model, self.inputs), self.expected, step)

    def assert_saved_as_before(self, model: PreTrainedModel, folder: Path) -> None:
        """That it is saved to the same bytes."""
        model.save_pretrained(folder / "saved")
        found, expected = files(folder / "saved"), files(self.folder / "saved")
        assert found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == []


def logged():
    """What hf_kbit logs while a ``with`` lasts."""
    return TestCase().assertLogs("transformers.hf_kbit", logging.INFO)


_lives: dict[str, Life] = {}


def life(name: str, folders) -> Life:
    """Of one of ``KINDS`` or ``ROWS``; the same one each time, which nobody must change."""
    if name not in _lives:
        _lives[name] = Life((KINDS | ROWS)[name], folders.mktemp("life"))
    return _lives[name]


def weights(model: nn.Module) -> dict[str, KbitTensor]:
    """Packed weights by the names of parameters, those that are tied by each name."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if isinstance(parameter, KbitTensor)}


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


@torch.no_grad()
def run(model: nn.Module, inputs: dict) -> dict[str, torch.Tensor]:
    """Every floating tensor that a forward pass returns.

    Tensors of a mapped file lie anywhere, and the address of an operand can decide in which order a library adds: they
    are brought to aligned ones, for results shall be equal to the last bit.
    """
    for tensor in model.parameters():
        if not isinstance(tensor, KbitTensor) and not tensor.is_meta and tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()
    dtype = next(tensor.dtype for tensor in model.parameters())
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    outputs = model(**inputs)
    return {k: x for k, x in outputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}


def same_outputs(found: dict, expected: dict, step: str, exact: bool = True) -> None:
    """Exactly, or to the rounding of sums taken in another order: eps of the largest output, tens of times."""
    assert found.keys() == expected.keys(), f"{step}: other outputs"
    for name in expected:
        assert found[name].isfinite().all(), f"{step}: {name} is not finite"
        tolerance = 0.0 if exact else 32 * torch.finfo(expected[name].dtype).eps * expected[name].abs().max().item()
        torch.testing.assert_close(
            found[name], expected[name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{step}: {name}: {text}"
        )


def same_tensors(found: nn.Module, expected: nn.Module, step: str) -> None:
    found, expected = found.state_dict(), expected.state_dict()
    assert found.keys() == expected.keys(), f"{step}: other tensors"
    for name in expected:
        assert found[name].dtype == expected[name].dtype, f"{step}: {name}: dtype {found[name].dtype}"
        assert torch.equal(found[name], expected[name]), f"{step}: {name} differs"


def assert_tied(model: nn.Module, kind: Kind) -> None:
    """That what is one weight is one still, and nothing else is."""
    found = weights(model)
    for name, source in kind.tied.items():
        assert found[name] is found[source], name
    assert len({id(weight) for weight in found.values()}) == len(found) - len(kind.tied)


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))
