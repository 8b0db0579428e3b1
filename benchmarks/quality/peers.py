"""The ways of other libraries to quantize a model, by their own code, that ``measure`` compares with those of hf_kbit.

A library is imported where it is used, so that the others are measured where it is missing.
"""

import ctypes
import math
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GgufConfig

from benchmarks.quality.exl3 import exl3_methods
from benchmarks.quality.methods import (
    HEADS,
    OWN_TEXT,
    Method,
    Storage,
    dtype_of,
    linears,
    load,
    own_sequences,
    training_sequences,
)

# Half-precision scale and zero for so many weights: 0.5 bits, the 0.25 of hf_kbit, and more than either.
HQQ_GROUPS = (64, 128, 32)
# Symmetric with a half-precision scale: 0.5 bits, and 0.25.
TORCHAO_GROUPS = (32, 64)
# Half-precision scale and zero; a row is a multiple of the group, which 128 is not of SmolLM2's 576.
INT4_GROUPS = (32, 64, 128)
# Scale and zero in about 8 bits each for so many weights, and 16 bits for a column: 0.25 bits and a little, and more.
SINQ_GROUPS = (64, 128, 32)
# Of AutoRound and GPTQ: symmetric with a half-precision scale for 128, the default; the 0.25 bits of hf_kbit; and with
# a zero as well.
CALIBRATED_GROUPS = ((128, True), (64, True), (64, False))
# AutoRound's other recipe: a quarter of the steps, each twice as long.
LIGHT = {"iters": 50, "lr": 5e-3}
# Kinds of files that llama.cpp writes; the number is about that of bits. K-quants share a scale among 256 weights. Of
# models whose rows are no multiple of that, as SmolLM2-135M's and gemma-3-270m's, all but down_proj get a kind with
# blocks of 32, and more bits.
GGUF = ("IQ2_XXS", "IQ2_M", "Q2_K", "IQ3_XXS", "Q3_K_M", "IQ4_XS", "Q4_K_M", "Q4_0", "IQ4_NL")


def grid(group: int, symmetric: bool) -> str:
    return f"{'symmetric, ' if symmetric else ''}group {group}"


# --- bitsandbytes ---------------------------------------------------------------------------------


def load_bitsandbytes(folder: Path, device: str, kind: str, double: bool) -> nn.Module:
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=dtype_of(folder),
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


def load_int8(folder: Path, device: str) -> nn.Module:
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=list(HEADS))
    return load(folder, device, quantization_config=config)


def int8_storage(model: nn.Module) -> Storage:
    from bitsandbytes.nn import Linear8bitLt

    weights = [layer.weight for layer in model.modules() if isinstance(layer, Linear8bitLt)]
    return Storage(
        sum(weight.numel() for weight in weights),
        sum(weight.nbytes for weight in weights),
        sum(weight.SCB.nbytes for weight in weights),
    )


def bitsandbytes_methods() -> list[Method]:
    four = [
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
    return [Method("bitsandbytes", 8, "LLM.int8()", load_int8, int8_storage), *four]


# --- HQQ ------------------------------------------------------------------------------------------


def load_hqq(folder: Path, device: str, bits: int, group: int) -> nn.Module:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    model = load(folder, device)
    for name, layer in linears(model).items():
        config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=1)
        model.set_submodule(name, HQQLinear(layer, config, compute_dtype=model.dtype, device=device))
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
        for group in INT4_GROUPS
    ]
    return intx + int4


# --- SINQ -----------------------------------------------------------------------------------------


def load_sinq(folder: Path, device: str, bits: int, group: int) -> nn.Module:
    """By its layers, as Transformers makes them: in Transformers itself (5.17, sinq 0.2.0) they lose their biases."""
    from sinq.sinqlinear_hf import SINQLinear, sinq_base_quant_config

    config = sinq_base_quant_config(nbits=bits, group_size=group, method="sinq")
    model = load(folder, device)
    for name, layer in linears(model).items():
        made = SINQLinear(linear_layer=layer, quant_config=config, compute_dtype=model.dtype, device=device)
        model.set_submodule(name, made)
    return model


def sinq_storage(model: nn.Module) -> Storage:
    """Its scales and zeros are a tuple of codes in 8 bits, with scales and minima of their own, and a shape."""
    from sinq.sinqlinear_hf import SINQLinear

    layers = [layer for layer in model.modules() if isinstance(layer, SINQLinear)]
    others = [part for layer in layers for key in ("scale", "zero") for part in layer.meta[key][:3]]
    others += [layer.meta["scale2"] for layer in layers]
    return Storage(
        sum(math.prod(layer.meta["shape"]) for layer in layers),
        sum(layer.W_q.nbytes for layer in layers),
        sum(other.nbytes for other in others),
    )


def sinq_methods() -> list[Method]:
    return [
        Method(
            "sinq",
            bits,
            f"group {group}",
            partial(load_sinq, bits=bits, group=group),
            sinq_storage,
            "its dequantize, then torch",
        )
        for bits in (2, 3, 4)
        for group in SINQ_GROUPS
    ]


# --- AutoRound ------------------------------------------------------------------------------------


def load_autoround(
    folder: Path, device: str, bits: int, group: int, symmetric: bool, data=training_sequences, **recipe
) -> nn.Module:
    """Calibrated on the sequences that hf_kbit reads: the data it takes by itself are on the Hub."""
    from auto_round import AutoRound

    model, tokenizer = load(folder, device), AutoTokenizer.from_pretrained(folder)
    sequences = data(folder, model)
    quantizer = AutoRound(
        model,
        tokenizer,
        bits=bits,
        group_size=group,
        sym=symmetric,
        dataset=list(sequences.split(1)),
        nsamples=len(sequences),
        seqlen=sequences.shape[1],
        device_map=device,
        **recipe,
    )
    return quantizer.quantize()[0].to(device)


def autoround_storage(model: nn.Module) -> Storage:
    """Of what it would save; its layers hold decoded weights. A symmetric layer's zeros are all the same."""
    count = codes = others = 0
    for layer in linears(model).values():
        weights = layer.weight.numel()
        count += weights
        codes += weights * layer.bits // 8
        others += layer.scale.nbytes
        if not layer.sym:
            others += layer.zp.numel() * layer.bits // 8
    return Storage(count, codes, others)


def autoround_methods() -> list[Method]:
    return [
        Method(
            "auto-round",
            bits,
            f"{light}{grid(group, symmetric)}{text}",
            partial(load_autoround, bits=bits, group=group, symmetric=symmetric, data=data, **recipe),
            autoround_storage,
            "decoded weights, torch",
        )
        for bits in (2, 3, 4)
        for group, symmetric in CALIBRATED_GROUPS
        for light, recipe in (("", {}), ("light, ", LIGHT))
        for text, data in (("", training_sequences), (OWN_TEXT, own_sequences))
    ]


# --- llm-compressor -------------------------------------------------------------------------------


def load_gptq(folder: Path, device: str, bits: int, group: int, symmetric: bool, data=training_sequences) -> nn.Module:
    """Calibrated on the sequences that hf_kbit reads."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    model = load(folder, device)
    sequences = data(folder, model)
    weights = {"num_bits": bits, "symmetric": symmetric, "strategy": "group", "group_size": group}
    groups = {"linears": {"targets": ["Linear"], "weights": weights}}
    oneshot(
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(folder),
        recipe=GPTQModifier(config_groups=groups, ignore=list(HEADS)),
        dataset=DataLoader([{"input_ids": sequence} for sequence in sequences]),
        num_calibration_samples=len(sequences),
    )
    return model.to(device)


def gptq_storage(model: nn.Module) -> Storage:
    """Of what it would save; its layers hold decoded weights. A symmetric layer's zeros are all the same."""
    count = codes = others = 0
    for layer in linears(model).values():
        weights, scheme = layer.weight.numel(), layer.quantization_scheme.weights
        count += weights
        codes += weights * scheme.num_bits // 8
        others += layer.weight_scale.nbytes
        if not scheme.symmetric:
            others += layer.weight_zero_point.numel() * scheme.num_bits // 8
    return Storage(count, codes, others)


def gptq_methods() -> list[Method]:
    return [
        Method(
            "llmcompressor",
            bits,
            f"GPTQ, {grid(group, symmetric)}{text}",
            partial(load_gptq, bits=bits, group=group, symmetric=symmetric, data=data),
            gptq_storage,
            "decoded weights, torch",
        )
        for bits in (2, 3, 4)
        for group, symmetric in CALIBRATED_GROUPS
        for text, data in (("", training_sequences), (OWN_TEXT, own_sequences))
    ]


# --- llama.cpp ------------------------------------------------------------------------------------


def load_gguf(file: Path, device: str, dtype: torch.dtype) -> nn.Module:
    """A causal language model with the decoded weights of a GGUF file."""
    config = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=config, dtype=dtype, device_map=device
    )


@torch.inference_mode()
def mean_squares(model: nn.Module, sequences: torch.Tensor) -> dict[str, torch.Tensor]:
    """float32 ``[in_features]`` on the CPU: of the inputs of each layer to quantize, by its name."""
    sums = {}

    def watch(name: str):
        def add(layer, inputs) -> None:
            sums[name] = sums.get(name, 0) + inputs[0].float().square().flatten(0, -2).mean(0)

        return add

    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in linears(model).items()]
    for sequence in sequences.split(1):
        model(sequence.to(model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: (total / len(sequences)).cpu() for name, total in sums.items()}


def importance_matrix(folder: Path, device: str):
    """What llama.cpp's quantizer takes to weigh errors by: a C array that ends with an entry without a name."""
    import gguf
    import llama_cpp

    model = load(folder, device)
    architecture = gguf.GGUFReader(folder / "model.gguf").fields[gguf.Keys.General.ARCHITECTURE].contents()
    (kind,) = (kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    found = mean_squares(model, training_sequences(folder, model))
    entries = (llama_cpp.llama_model_imatrix_data * (len(found) + 1))()
    for entry, (name, squares) in zip(entries, found.items(), strict=False):
        entry.name, entry.size = f"{names.get_name(name)}.weight".encode(), len(squares)
        entry.data = (ctypes.c_float * len(squares))(*squares.tolist())
    return entries


def load_llama_cpp(folder: Path, device: str, kind: str, with_data: bool) -> nn.Module:
    import gguf
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)  # alive as long as it is called
    llama_cpp.llama_log_set(silent, None)
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    # The table, and the head, which it may be tied to.
    options.token_embedding_type = options.output_tensor_type = gguf.GGMLQuantizationType.BF16
    if with_data:
        options.imatrix = importance_matrix(folder, device)
    source = folder / "model.gguf"
    if not source.exists():
        raise FileNotFoundError(f"{source}: found none, expected the model as llama.cpp reads it")
    decode = llama_cpp.llama_model_quantize_default_params()  # by llama.cpp too: Transformers takes minutes
    decode.ftype, decode.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16, True
    with tempfile.TemporaryDirectory() as temporary:
        written, decoded = (Path(temporary) / f"{name}.gguf" for name in (kind, "decoded"))
        for read, write, how in ((source, written, options), (written, decoded, decode)):
            if llama_cpp.llama_model_quantize(bytes(read), bytes(write), ctypes.byref(how)):
                raise RuntimeError(f"llama.cpp: could not write {write.stem} of {kind}")
        model = load_gguf(decoded, device, dtype_of(folder))
        model.gguf_sizes = [
            (int(tensor.n_elements), int(tensor.n_bytes))
            for tensor in gguf.GGUFReader(written).tensors
            if tensor.name.startswith("blk.") and len(tensor.shape) > 1
        ]
    return model


def llama_cpp_storage(model: nn.Module) -> Storage:
    """Of the file; a block's scales are among its codes."""
    count, stored = (sum(sizes) for sizes in zip(*model.gguf_sizes, strict=True))
    return Storage(count, stored, 0, 8 * stored / count)


def llama_cpp_methods() -> list[Method]:
    return [
        Method(
            "llama_cpp_python",
            int(kind.strip("IQ")[0]),
            f"{kind}{', importance matrix' if with_data else ''}",
            partial(load_llama_cpp, kind=kind, with_data=with_data),
            llama_cpp_storage,
            "decoded weights, torch",
        )
        for kind in GGUF
        for with_data in (False, True)
    ]


def peers() -> list[Method]:
    return [
        *bitsandbytes_methods(),
        *hqq_methods(),
        *torchao_methods(),
        *sinq_methods(),
        *autoround_methods(),
        *gptq_methods(),
        *exl3_methods(),
        *llama_cpp_methods(),
    ]
