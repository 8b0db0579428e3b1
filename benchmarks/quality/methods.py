"""What a way to quantize a model is to ``measure``, and those of hf_kbit; ``peers`` has those of other libraries.

All quantize the same layers: every ``nn.Linear`` but the head. To add one, write a function that loads the model and
one that counts what is stored, and put a ``Method`` into ``methods``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoTokenizer

import hf_kbit
from benchmarks.quality.data import training_text
from hf_kbit.calibration.data import Text
from hf_kbit.calibration.solving import METHODS
from hf_kbit.calibration.stream import usual
from hf_kbit.calibration.widths import choose_widths
from hf_kbit.calibration.writing import TRELLIS_SEQUENCES, write
from hf_kbit.format.spec import BITS

HEADS = ("lm_head", "pooler.dense")  # of a Llama and of all-MiniLM-L6-v2, whose own is of no use to it
# Scales are searched for all but the first, which is the plain one that others are compared with.
KBIT = (
    ("normal_float", "absmax"),
    ("normal_float", "search"),
    ("optimal", "search"),
    ("int", "search"),
    ("fp4", "search"),
)
# Sequences of 1024 tokens, or of what the model reads, from the first of so many characters. all-MiniLM-L6-v2 reads
# sentences, of 8 to 18 tokens here.
CALIBRATION_SEQUENCES, CALIBRATION_CHARACTERS, SENTENCE = 128, 1 << 20, 16
# Mean widths of models whose layers differ, without data and calibrated; measured on one of so many of the sequences.
MIXED_BITS, CALIBRATED_MIXED_BITS, WIDTHS_ONE_IN = (2.5, 3, 3.5, 4.5), (2.5, 3.5), 32
MIXED = ", mixed"  # ends the words for one, whose layers are quantized as the words before it say
OWN_TEXT = ", own text"  # that hf_kbit takes when it is given none
BUILT_IN = ", built-in text"  # what "weighted" takes when it is given no text
TUNED_BITS = (2, 2.5, 3, 4)  # the same, and tuned
TUNED = ", tuned"
INT8 = ", 8-bit inputs"
TRELLIS_BITS = (2, 3, 4)
WIDER_BITS = BITS[:-1]  # of which keys and values have one more
WIDER = ", wider keys and values"


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


def dtype_of(folder: Path) -> torch.dtype:
    """What a model computes in: float16, unless it comes in bfloat16, whose range its activations may need."""
    stored = AutoConfig.from_pretrained(folder).dtype
    return stored if stored == torch.bfloat16 else torch.float16


def load(folder: Path, device: str, dtype: torch.dtype | None = None, **kwargs) -> nn.Module:
    """The model in a folder, of the class that its configuration names."""
    kind = getattr(transformers, AutoConfig.from_pretrained(folder).architectures[0])
    return kind.from_pretrained(folder, dtype=dtype or dtype_of(folder), device_map=device, **kwargs)


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


def load_kbit(folder: Path, device: str, **choices) -> nn.Module:
    return load(folder, device, quantization_config=hf_kbit.KbitConfig(**choices))


def kbit_storage(model: nn.Module) -> Storage:
    """Of the stored form, with scales of rows and columns; a table of levels, in float32, counts once for all that
    share it."""
    layers = [layer for layer in model.modules() if isinstance(layer, hf_kbit.KbitLinear)]
    stored = [[tensor.nbytes for tensor in layer.weight.file_tensors().values()] for layer in layers]
    tables = {layer.decoding.levels for layer in layers if layer.decoding.kind == "scalar"}
    weights = [layer.in_features * layer.out_features for layer in layers]
    return Storage(
        sum(weights),
        sum(codes for codes, *_ in stored),
        sum(sum(scales) for _, *scales in stored) + sum(4 * len(table) for table in tables),
        sum(layer.bits * count for layer, count in zip(layers, weights, strict=True)) / sum(weights),
    )


@cache
def training_ids(folder: Path) -> torch.Tensor:
    """int64 ``[n]``: text like what is held out, none of it: that beside the model, else of what it was trained on."""
    beside = folder / "calibration.safetensors"
    if beside.exists():
        return load_file(beside)["tokens"].long()
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


def own_sequences(folder: Path, model: nn.Module, count: int | None = None) -> torch.Tensor:
    """What hf_kbit takes when it is given no text: the model writes it; where it cannot, it is the built-in text."""
    written = write(model, count)
    if written is None:
        written = torch.stack(Text(None, AutoTokenizer.from_pretrained(folder), **amount(model)).ids(model))
    return written.cpu()


def own_sequences_for_trellises(folder: Path, model: nn.Module) -> torch.Tensor:
    return own_sequences(folder, model, usual(TRELLIS_SEQUENCES, model.device))


def built_in_sequences(folder: Path, model: nn.Module) -> torch.Tensor:
    return torch.stack(Text(tokenizer=AutoTokenizer.from_pretrained(folder)).little().ids(model)).cpu()


def load_calibrated(folder: Path, device: str, data=training_sequences, **choices) -> nn.Module:
    model = load(folder, device)
    return hf_kbit.calibrate(model, data(folder, model), **choices)


@cache
def text_to_tune_on(folder: Path, device: str) -> torch.Tensor:
    """What the model writes where it is to be tuned without data. It takes as long as tuning does: once for all."""
    model = load(folder, device)
    return write(model, tune=True, device=device).cpu()


def load_tuned(folder: Path, device: str, **choices) -> nn.Module:
    """What ``calibrate=True, tune=True`` gives without data."""
    text, model = text_to_tune_on(folder, device), load(folder, device)
    hf_kbit.quantize_model(model, data=text, tune=True, **choices)
    return model


def mixed_config(model: nn.Module, sequences: torch.Tensor, bits: float) -> hf_kbit.KbitConfig:
    return choose_widths(model, sequences[::WIDTHS_ONE_IN].flatten(), bits)


def load_mixed(folder: Path, device: str, bits: float) -> nn.Module:
    model = load(folder, device)
    return load(folder, device, quantization_config=mixed_config(model, training_sequences(folder, model), bits))


def load_mixed_calibrated(folder: Path, device: str, bits: float, method: str, data=training_sequences) -> nn.Module:
    model = load(folder, device)
    sequences = data(folder, model)
    config = mixed_config(model, sequences, bits)
    return hf_kbit.calibrate(model, sequences, method=method, bits=config.bits, module_bits=config.module_bits)


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
    with_int8 = [
        Method("hf_kbit", bits, f"optimal, {how}{INT8}", partial(loaded, bits=bits, inputs="int8"), kbit_storage)
        for bits in BITS
        for how, loaded in (("search", load_kbit), ("feedback", partial(load_calibrated, method="feedback")))
    ]
    without_text = [
        Method(
            "hf_kbit",
            bits,
            f"optimal, {method}{text}",
            partial(load_calibrated, bits=bits, method=method, data=data),
            kbit_storage,
        )
        for method, text, data in (("feedback", OWN_TEXT, own_sequences), ("weighted", BUILT_IN, built_in_sequences))
        for bits in BITS
    ]
    tuned = [
        Method(
            "hf_kbit",
            bits,
            f"optimal, feedback{OWN_TEXT}{TUNED}{'' if bits in BITS else MIXED}",
            partial(load_tuned, bits=bits),
            kbit_storage,
        )
        for bits in TUNED_BITS
    ]
    mixed = [
        Method("hf_kbit", bits, f"optimal, search{MIXED}", partial(load_mixed, bits=bits), kbit_storage)
        for bits in MIXED_BITS
    ]
    mixed_calibrated = [
        Method(
            "hf_kbit",
            bits,
            f"optimal, feedback{text}{MIXED}",
            partial(load_mixed_calibrated, bits=bits, method="feedback", data=data),
            kbit_storage,
        )
        for bits in CALIBRATED_MIXED_BITS
        for text, data in (("", training_sequences), (OWN_TEXT, own_sequences))
    ]
    wider = [
        Method(
            "hf_kbit",
            bits,
            f"optimal, {how}{WIDER}",
            partial(loaded, bits=bits, module_bits={"k_proj": bits + 1, "v_proj": bits + 1}),
            kbit_storage,
        )
        for bits in WIDER_BITS
        for how, loaded in (
            ("search", load_kbit),
            (f"feedback{OWN_TEXT}", partial(load_calibrated, method="feedback", data=own_sequences)),
        )
    ]
    trellises = [
        Method("hf_kbit", bits, f"trellis{how}", partial(loaded, bits=bits, codebook="trellis"), kbit_storage)
        for bits in TRELLIS_BITS
        for how, loaded in (
            ("", load_kbit),
            (f", weighted{BUILT_IN}", partial(load_calibrated, method="weighted", data=built_in_sequences)),
            (", feedback", partial(load_calibrated, method="feedback")),
            (f", feedback{OWN_TEXT}", partial(load_calibrated, method="feedback", data=own_sequences_for_trellises)),
            (f", feedback{OWN_TEXT}{TUNED}", load_tuned),
        )
    ]
    return free + calibrated + with_int8 + without_text + tuned + mixed + mixed_calibrated + wider + trellises


def methods() -> list[Method]:
    return [Method("fp16", 16, "as trained", load, dense_storage, "torch"), *kbit_methods()]
