"""``calibrate``: quantizes a model that is in memory, with solvers that know what goes through its layers."""

from types import ModuleType
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from hf_kbit import codebooks
from hf_kbit.calibration import capture, feedback, learned, weighted
from hf_kbit.calibration.data import token_ids
from hf_kbit.config import KbitConfig
from hf_kbit.evaluation import evaluating
from hf_kbit.integrations import selection
from hf_kbit.integrations.transformers import KbitHfQuantizer
from hf_kbit.linear import KbitLinear

# A solver is a module with ``solve(weight, moments, codebook) -> planes, absmax`` and ``DIAGONAL``: whether moments
# are the diagonal of the sum of x @ x.T, or all of it.
METHODS: dict[str, ModuleType] = {"feedback": feedback, "learned": learned, "weighted": weighted}


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    data: torch.Tensor | str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    method: str = "feedback",
    batch: int = 4,
    progress: bool = False,
    **config: Any,
) -> PreTrainedModel:
    """Quantizes a model in place, so that on text like ``data`` its layers compute nearly what they did.

    The layers of the model are quantized one after another, each for the inputs that the quantized ones before it
    give. The result is like that of ``from_pretrained`` with a ``KbitConfig``: it runs, trains, saves and loads the
    same way, and which layers are quantized is decided the same way. Decoders, encoders and encoder-decoders; the
    latter read the same tokens on both sides.

    Args:
        model: float32, float16 or bfloat16, on one device. It is changed, and needs memory for itself, one layer's
            statistics and, a few times over, the activations between two layers.
        data: int64 ``[sequences, tokens]``, none of them padding, or a text, which is cut into sequences of 2048
            tokens or what the model has positions for. Some 64,000 tokens of the kind that the model is for.
        tokenizer: for a text.
        method: ``"feedback"``: the weights not yet rounded make up for the errors of those that are; needs K * K
            float32 for a layer of K in_features. ``"weighted"``: only scales are chosen, by errors weighted by the
            inputs' squares; quicker.
        batch: sequences that go through a layer at a time.
        progress: shows a bar.
        config: arguments of ``KbitConfig``, such as ``bits=3``; ``scale`` is always searched.

    Returns:
        ``model``.

    Raises:
        TypeError: ``data`` is neither token ids nor text, or an argument is unknown.
        ValueError: an argument is out of range, the model is quantized already, is spread over devices, or has layers
            that tokens do not go through, or a weight is NaN or infinite: the model is as it was. Or the inputs of a
            layer are: then the model is unusable.

    Source: layer by layer as GPTQ (arXiv:2210.17323); the solvers' files name their own.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **shape))
    >>> calibrate(model, torch.randint(64, (8, 32)), bits=3).model.layers[0].mlp.down_proj
    KbitLinear(in_features=64, out_features=32, bias=False, bits=3)
    """
    if method not in METHODS:
        raise ValueError(f"method: found {method!r}, expected one of {sorted(METHODS)}")
    if batch < 1:
        raise ValueError(f"batch: found {batch}, expected 1 or more")
    quantizer = KbitHfQuantizer(KbitConfig(**config), pre_quantized=False)
    if quantizer.quantization_config.scale != "search":
        raise ValueError(f"scale: found {quantizer.quantization_config.scale!r}, expected 'search' or none")
    widths = _check_model(model, quantizer.quantization_config)
    ids = token_ids(data, tokenizer, model)
    training = {name: model.get_submodule(name).training for name in widths}
    with evaluating(model):
        layers = capture.units(model, list(widths))
        capture.check(model, layers, ids)
        solver = METHODS[method]

        with tqdm(total=len(widths), desc="calibrating", disable=not progress) as bar:

            def visit(unit, forward):
                dense = {name: model.get_submodule(name) for name in layers[unit]}
                with capture.moments(dense, solver.DIAGONAL) as moments:
                    forward()
                for name, module in dense.items():
                    layer = quantizer.new_layer(model, name, widths[name]).train(training[name])
                    _solve(name, layer, module, moments[name], solver)
                    selection.replace_modules(model, {name: layer})
                    bar.update()

            capture.stream(model, layers, ids, batch, visit)
    model.hf_quantizer, model.is_quantized = quantizer, True
    model.quantization_method = quantizer.quantization_config.quant_method
    quantizer.postprocess_model(model)
    return model


def _check_model(model, config: KbitConfig) -> dict[str, int]:
    """``{module name: bits}`` of the layers to quantize, of a model that can be calibrated."""
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("model: found it quantized already, expected one in 16 or 32 bits")
    if not capture.reads_tokens(model):
        raise ValueError(f"model: found {type(model).__name__}, expected a model that reads token ids (input_ids)")
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1 or devices == {"meta"}:
        raise ValueError(f"model: found it on {sorted(devices)}, expected one device")
    widths = selection.choose(model, config)
    if not widths:
        raise ValueError(f"model: found no linear layer to quantize in {type(model).__name__}")
    for name in widths:
        if not model.get_submodule(name).weight.isfinite().all():
            raise ValueError(f"{name}.weight: found NaN or infinite values, expected finite ones")
    return widths


def _solve(name: str, layer: KbitLinear, dense: nn.Module, moments: torch.Tensor, solver: ModuleType) -> None:
    """Gives ``layer`` the weight of ``dense``, as the solver quantizes it."""
    if not moments.isfinite().all():
        raise ValueError(f"{name}: found NaN or infinite inputs, expected finite ones")
    weight = dense.weight.T if isinstance(dense, Conv1D) else dense.weight
    layer.choose_levels(weight, f"{name}.weight")
    codebook = codebooks.scaled(layer.levels, 0, weight.device)
    layer.load_planes(*solver.solve(weight.float() * 2.0**-layer.exponent, moments, codebook))
    # As weights are marked that Transformers has loaded.
    layer.weight._is_hf_initialized = layer.weight_absmax._is_hf_initialized = True
