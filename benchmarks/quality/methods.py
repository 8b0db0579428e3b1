"""The ways to quantize a model that ``measure`` compares: hf_kbit's, and those of other libraries by their own code.

All quantize the same layers: every ``nn.Linear`` but the head. To add one, write a function that loads the model and
one that counts what is stored, and put a ``Method`` into ``methods``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig

import hf_kbit
from benchmarks.quality.data import training_text
from hf_kbit.calibration.layerwise import METHODS
from hf_kbit.format import BITS
from hf_kbit.widths import choose_widths

HEADS = ("lm_head", "pooler.dense")  # of a Llama and of all-MiniLM-L6-v2, whose own is of no use to it
# Scales are searched for all but the first, which is the plain one that others are compared with.
KBIT = (
    ("normal_float", "absmax"),
    ("normal_float", "search"),
    ("optimal", "search"),
    ("int", "search"),
    ("fp4", "search"),
    ("layer", "search"),
)
# Sequences of 1024 tokens, or of what the model reads, from the first of so many characters; those go through a layer
# so many tokens at a time. all-MiniLM-L6-v2 reads sentences, of 8 to 18 tokens here.
CALIBRATION_SEQUENCES, CALIBRATION_CHARACTERS, BATCH_TOKENS, SENTENCE = 128, 1 << 20, 4096, 16
# Mean widths of models whose layers differ, without data and calibrated; measured on one of so many of the sequences.
MIXED_BITS, CALIBRATED_MIXED_BITS, WIDTHS_ONE_IN = (2.5, 3, 3.5, 4.5), (2.5, 3.5), 32
MIXED = ", mixed"  # ends the words for one, whose layers are quantized as the words before it say
PROMPTS_BITS = (2, 3, 4)  # calibrated on the text that hf_kbit brings along
# Half-precision scale and zero for so many weights: 0.5 bits, the 0.25 of hf_kbit, and more than either.
HQQ_GROUPS = (64, 128, 32)
# Symmetric with a half-precision scale: 0.5 bits, and 0.25.
TORCHAO_GROUPS = (32, 64)


@dataclass(frozen=True)
class Storage:
    """What the quantized layers of a model take."""

    weights: int
    code_bytes: int
    other_bytes: int  # of scales, zeros and levels
    bits: float | None = None  # of a code, on average, where that may differ from the method's


@dataclass(frozen=True)
class Method:
    """A library, its (mean) width, what it does in words, and how to get the model from a folder onto a device."""

    library: str
    bits: float
    way: str
    load: Callable[[Path, str], nn.Module]
    storage: Callable[[nn.Module], Storage]
    runs: str = "own kernels"  # or what computes the products instead

    @property
    def label(self) -> str:
        return f"{self.library} {self.bits} {self.way}"


def load(folder: Path, device: str, dtype: torch.dtype = torch.float16, **kwargs) -> nn.Module:
    """The model in a folder, of the class that its configuration names."""
    kind = getattr(transformers, AutoConfig.from_pretrained(folder).architectures[0])
    return kind.from_pretrained(folder, dtype=dtype, device_map=device, **kwargs)


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in HEADS}


@torch.no_grad()
def squared_error(model: nn.Module, reference: nn.Module) -> float:
    """Of the weights of all quantized layers, over the sum of their squares.

    A layer's weights are what it makes of unit vectors, which is how every library can be asked for them.
    """
    error = square = 0.0
    for name, layer in linears(reference).items():
        units = torch.eye(layer.in_features, device=reference.device, dtype=model.dtype)
        found = model.get_submodule(name)(units).float()
        if layer.bias is not None:
            found -= layer.bias.float()
        weight = layer.weight.float().T
        error += (found - weight).square().sum(dtype=torch.float64).item()
        square += weight.square().sum(dtype=torch.float64).item()
    return error / square


def dense_storage(model: nn.Module) -> Storage:
    weights = [layer.weight for layer in linears(model).values()]
    return Storage(sum(weight.numel() for weight in weights), sum(weight.nbytes for weight in weights), 0)


# --- hf_kbit --------------------------------------------------------------------------------------


def load_kbit(folder: Path, device: str, bits: int, codebook: str, scale: str) -> nn.Module:
    return load(folder, device, quantization_config=hf_kbit.KbitConfig(bits=bits, codebook=codebook, scale=scale))


def kbit_storage(model: nn.Module) -> Storage:
    """Of the stored form; a table of levels, in float32, counts once however many layers share it."""
    layers = [layer for layer in model.modules() if isinstance(layer, hf_kbit.KbitLinear)]
    stored = [layer.state_dict() for layer in layers]
    tables = {layer.levels for layer in layers}
    weights = [layer.in_features * layer.out_features for layer in layers]
    return Storage(
        sum(weights),
        sum(state["weight"].nbytes for state in stored),
        sum(state["weight_absmax"].nbytes for state in stored) + sum(4 * len(table) for table in tables),
        sum(layer.bits * count for layer, count in zip(layers, weights, strict=True)) / sum(weights),
    )


@cache
def training_ids(folder: Path) -> torch.Tensor:
    """int64 ``[n]``: text of the kind that the model was trained on, of no folder that is held out."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer(training_text(CALIBRATION_CHARACTERS), return_tensors="pt", verbose=False)["input_ids"][0]


def amount(model: nn.Module) -> dict[str, int]:
    """Of calibration data: sequences as long as those that the model reads when it is measured, and as many tokens
    however long they are."""
    window = min(1024, model.config.max_position_embeddings)
    length = min(window, SENTENCE if model.get_output_embeddings() is None else window)
    return {"sequences": CALIBRATION_SEQUENCES * (window // length), "length": length}


def training_sequences(folder: Path, model: nn.Module) -> torch.Tensor:
    ids, size = training_ids(folder), amount(model)
    return ids[: len(ids) // size["length"] * size["length"]].view(-1, size["length"])[: size["sequences"]]


def calibrate(model: nn.Module, data: torch.Tensor | None, **choices) -> nn.Module:
    return hf_kbit.calibrate(model, data, batch=max(BATCH_TOKENS // amount(model)["length"], 1), **choices)


def load_calibrated(folder: Path, device: str, bits: int, method: str) -> nn.Module:
    model = load(folder, device)
    return calibrate(model, training_sequences(folder, model), bits=bits, method=method)


def load_calibrated_on_prompts(folder: Path, device: str, bits: int, method: str) -> nn.Module:
    model, tokenizer = load(folder, device), AutoTokenizer.from_pretrained(folder)
    return calibrate(model, None, tokenizer=tokenizer, bits=bits, method=method, **amount(model))


def mixed_config(folder: Path, model: nn.Module, bits: float) -> hf_kbit.KbitConfig:
    return choose_widths(model, training_sequences(folder, model)[::WIDTHS_ONE_IN].flatten(), bits)


def load_mixed(folder: Path, device: str, bits: float) -> nn.Module:
    return load(folder, device, quantization_config=mixed_config(folder, load(folder, device), bits))


def load_mixed_calibrated(folder: Path, device: str, bits: float, method: str) -> nn.Module:
    model = load(folder, device)
    config = mixed_config(folder, model, bits)
    widths = {"bits": config.bits, "module_bits": config.module_bits}
    return calibrate(model, training_sequences(folder, model), method=method, **widths)


def kbit_methods() -> list[Method]:
    free = [
        Method(
            "hf_kbit",
            bits,
            f"{codebook}, {scale}",
            partial(load_kbit, bits=bits, codebook=codebook, scale=scale),
            kbit_storage,
        )
        for bits in BITS
        for codebook, scale in KBIT
        if codebook != "fp4" or bits == 4
    ]
    calibrated = [
        Method("hf_kbit", bits, f"optimal, {method}", partial(load_calibrated, bits=bits, method=method), kbit_storage)
        for bits in BITS
        for method in METHODS
    ]
    on_prompts = [
        Method(
            "hf_kbit",
            bits,
            "optimal, feedback, built-in text",
            partial(load_calibrated_on_prompts, bits=bits, method="feedback"),
            kbit_storage,
        )
        for bits in PROMPTS_BITS
    ]
    mixed = [
        Method("hf_kbit", bits, f"optimal, search{MIXED}", partial(load_mixed, bits=bits), kbit_storage)
        for bits in MIXED_BITS
    ]
    mixed_calibrated = [
        Method(
            "hf_kbit",
            bits,
            f"optimal, feedback{MIXED}",
            partial(load_mixed_calibrated, bits=bits, method="feedback"),
            kbit_storage,
        )
        for bits in CALIBRATED_MIXED_BITS
    ]
    return free + calibrated + on_prompts + mixed + mixed_calibrated


# --- bitsandbytes ---------------------------------------------------------------------------------


def load_bitsandbytes(folder: Path, device: str, kind: str, double: bool) -> nn.Module:
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float16,
        llm_int8_skip_modules=list(HEADS),
    )
    return load(folder, device, quantization_config=config)


def bitsandbytes_storage(model: nn.Module) -> Storage:
    """Its tables of codes are the same for all layers, and count once."""
    from bitsandbytes.nn import Linear4bit

    weights = [layer.weight for layer in model.modules() if isinstance(layer, Linear4bit)]
    states = [weight.quant_state for weight in weights]
    scales, tables = sum(state.absmax.nbytes for state in states), states[0].code.nbytes
    if states[0].nested:
        scales += sum(state.state2.absmax.nbytes + state.offset.nbytes for state in states)
        tables += states[0].state2.code.nbytes
    return Storage(
        sum(state.shape.numel() for state in states), sum(weight.nbytes for weight in weights), scales + tables
    )


def bitsandbytes_methods() -> list[Method]:
    return [
        Method(
            "bitsandbytes",
            4,
            f"{kind.upper()}, block 64{', double' if double else ''}",
            partial(load_bitsandbytes, kind=kind, double=double),
            bitsandbytes_storage,
        )
        for kind in ("nf4", "fp4")
        for double in (False, True)
    ]


# --- HQQ ------------------------------------------------------------------------------------------


def load_hqq(folder: Path, device: str, bits: int, group: int) -> nn.Module:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    model = load(folder, device)
    for name, layer in linears(model).items():
        config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=1)
        model.set_submodule(name, HQQLinear(layer, config, compute_dtype=torch.float16, device=device))
    return model


def hqq_storage(model: nn.Module) -> Storage:
    from hqq.core.quantize import HQQLinear

    layers = [layer for layer in model.modules() if isinstance(layer, HQQLinear)]
    return Storage(
        sum(layer.meta["shape"].numel() for layer in layers),
        sum(layer.W_q.nbytes for layer in layers),
        sum(layer.meta[key].nbytes for layer in layers for key in ("scale", "zero")),
    )


def hqq_methods() -> list[Method]:
    return [
        Method(
            "hqq",
            bits,
            f"group {group}",
            partial(load_hqq, bits=bits, group=group),
            hqq_storage,
            "its dequantize, then torch",
        )
        for bits in (2, 3, 4)
        for group in HQQ_GROUPS
    ]


# --- torchao --------------------------------------------------------------------------------------


def quantize_torchao(model: nn.Module, config) -> nn.Module:
    from torchao.quantization import quantize_

    names = set(linears(model))
    quantize_(model, config, filter_fn=lambda module, name: name in names)
    return model


def load_intx(folder: Path, device: str, bits: int, group: int) -> nn.Module:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    config = IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), granularity=PerGroup(group))
    return quantize_torchao(load(folder, device), config)


def intx_storage(model: nn.Module) -> Storage:
    """Symmetric: its zeros are all 0 and need not be stored."""
    weights = [layer.weight for layer in linears(model).values()]
    return Storage(
        sum(weight.numel() for weight in weights),
        sum(weight.qdata.nbytes for weight in weights),
        sum(weight.scale.nbytes for weight in weights),
    )


def load_int4(folder: Path, device: str, group: int) -> nn.Module:
    from torchao.quantization import Int4WeightOnlyConfig

    # Of its forms the one that needs no further library; it takes bfloat16 alone.
    config = Int4WeightOnlyConfig(group_size=group, int4_packing_format="tile_packed_to_4d")
    return quantize_torchao(load(folder, device, dtype=torch.bfloat16), config)


def int4_storage(model: nn.Module, group: int) -> Storage:
    """A bfloat16 scale and zero for each group; those of columns added to reach a multiple of 1024 do not count."""
    weights = [layer.weight for layer in linears(model).values()]
    count = sum(weight.numel() for weight in weights)
    return Storage(count, sum(weight.qdata.nbytes for weight in weights), 4 * count // group)


def torchao_methods() -> list[Method]:
    intx = [
        Method(
            "torchao",
            bits,
            f"intx, symmetric, group {group}",
            partial(load_intx, bits=bits, group=group),
            intx_storage,
            "its dequantize, then torch",
        )
        for bits in (2, 3, 4)
        for group in TORCHAO_GROUPS
    ]
    int4 = [
        Method(
            "torchao",
            4,
            f"int4, group {group}",
            partial(load_int4, group=group),
            partial(int4_storage, group=group),
            "own kernels, bfloat16",
        )
        for group in (32, 128)
    ]
    return intx + int4


def methods() -> list[Method]:
    return [
        Method("fp16", 16, "as trained", load, dense_storage, "torch"),
        *kbit_methods(),
        *bitsandbytes_methods(),
        *hqq_methods(),
        *torchao_methods(),
    ]
