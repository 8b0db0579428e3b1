"""Which modules of a model are quantized, and putting others in their place."""

import dis
import inspect
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key
from transformers.pytorch_utils import Conv1D

from hf_kbit.config import KbitConfig
from hf_kbit.integrations.transformers import experts
from hf_kbit.nn.experts import is_projection, projections
from hf_kbit.nn.linear import KbitLinear
from hf_kbit.patterns import matches

# Subclasses of nn.Linear whose own forward computes what nn.Linear's does.
PLAIN_LINEAR_CLASSES = ("FalconLinear",)

# Methods that fill weights rather than use them.
INITIALISERS = ("__init__", "_init_weights", "reset_parameters")

# Instructions that load an attribute; before Python 3.12 that of a method which is called has a name of its own.
LOADS = ("LOAD_ATTR", "LOAD_METHOD")

GATE = re.compile(r"^gate$|(^|_)experts?_gate$")


def is_linear(module: nn.Module) -> bool:
    """Whether a ``KbitLinear`` can stand in for the module: a Linear that is used by calling it, or GPT-2's Conv1D."""
    if isinstance(module, Conv1D):
        return True
    # nn.MultiheadAttention reads the weight of its NonDynamicallyQuantizableLinear without calling it.
    return (
        isinstance(module, nn.Linear)
        and not isinstance(module, (KbitLinear, NonDynamicallyQuantizableLinear))
        and (type(module).forward is nn.Linear.forward or type(module).__name__ in PLAIN_LINEAR_CLASSES)
        and module.weight.numel() > 0
    )


@dataclass(frozen=True)
class Reads:
    """Names of submodules of which a class reads what ``nn.Linear`` would have, without calling them.

    Attributes:
        weights: ``self.NAME.weight``.
        parameters: ``self.NAME.parameters()``; what such code wants is the dtype of the first one.
    """

    weights: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()


@cache
def _reads(module_class: type) -> Reads:
    """What a class's methods read of its submodules, to multiply by it or to cast to its dtype."""
    methods = {name: method for parent in reversed(module_class.__mro__) for name, method in vars(parent).items()}
    found = {"weight": set(), "parameters": set()}
    for name, method in methods.items():
        code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
        if name in INITIALISERS or code is None or not found.keys() & set(code.co_names):
            continue
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for child, attribute in pairwise(steps):
            if child.opname == "LOAD_ATTR" and attribute.opname in LOADS and attribute.argval in found:
                found[attribute.argval].add(child.argval)
    return Reads(frozenset(found["weight"]), frozenset(found["parameters"]))


def _first_linear(module: nn.Module) -> str | None:
    """Name of the linear layer that holds the first parameter of the module, if one does; "" is the module itself."""
    first, _, _ = next((name for name, _ in module.named_parameters()), "").rpartition(".")
    return first if is_linear(module.get_submodule(first)) else None


def _is_router(model, name: str) -> bool:
    """Whether a layer chooses which experts of a mixture a token goes to, or how much of a shared one it gets.

    A name says so: ``router`` as a word anywhere in it (``mlp.router.layer``, ``router_gate``), or, in a module that
    has ``experts`` too, ``gate`` or ``shared_expert_gate``. A dense ``gate_proj`` is none.
    """
    parts = name.split(".")
    return any(
        "router" in part.split("_")
        or (GATE.search(part) is not None and hasattr(model.get_submodule(".".join(parts[:depth])), "experts"))
        for depth, part in enumerate(parts)
    )


def skips(model) -> dict[str, str]:
    """``{name: reason}`` of linear layers and projections that stay in 16 bits unless, or even if, they are asked for.

    - ``"head"``: the output embedding, or a head at the end of the model: small or sensitive.
    - ``"router"``: it routes tokens to experts: small, and a small error sends a token elsewhere.
    - ``"read"``: the model's code reads the weight instead of calling the layer (Mamba, WavLM, ColPali and many more),
      or its dtype through ``parameters()`` (Swin V2), and packed integers would give it a wrong answer or none.
    - ``"fixed"``: the weight is tied to another tensor, or kept in float32 by the model.
    """
    linears = {name for name, module in model.named_modules(remove_duplicate=False) if is_linear(module)}
    fused, reasons = set(projections(model)), {}
    # A number in its name means that the last module is the end of a layer, not a head.
    last = next(reversed(dict(model.named_parameters())), "").rpartition(".")[0]
    output = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    for name in linears:
        if model.get_submodule(name) is output or (name == last and not re.search(r"(^|\.)\d+(\.|$)", name)):
            reasons[name] = "head"
        elif _is_router(model, name):
            reasons[name] = "router"
    for name, module in model.named_modules():
        reads = _reads(type(module))
        for child in reads.weights:
            reasons[f"{name}.{child}".lstrip(".")] = "read"
        for child in reads.parameters:
            submodule = getattr(module, child, None)
            if isinstance(submodule, nn.Module) and (first := _first_linear(submodule)) is not None:
                reasons[f"{name}.{child}.{first}".strip(".")] = "read"
    tied = _tied(model)
    kept = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    float32 = {part for attribute in kept for part in getattr(model, attribute, None) or ()}
    for name in linears | fused:
        if (
            f"{name}.weight" in tied
            or name in tied
            or any(re.search(rf"(^|\.){part}($|\.)", name) for part in float32)
        ):
            reasons[name] = "fixed"
    return {name: reason for name, reason in reasons.items() if name in linears | fused}


def _tied(model: nn.Module) -> set[str]:
    """Names of parameters that are one, or that a model of Transformers says are to be."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    declared = getattr(model, "all_tied_weights_keys", {})
    found = {*declared, *declared.values()}
    modules = dict(model.named_modules(remove_duplicate=False))
    for same in names.values():
        # A module that stands in two places is one, and is replaced in both.
        if len({id(modules[name.rpartition(".")[0]]) for name in same}) > 1:
            found |= set(same)
    return found


def packable(model) -> list[str]:
    """Names of what can be quantized, in the order of the model: linear layers, and the projections of experts."""
    linears = [name for name, module in model.named_modules() if is_linear(module)]
    return sorted([*linears, *projections(model)], key=dot_natural_key)


def dense_weight(model, name: str) -> nn.Parameter:
    """The weight of a linear layer, or a projection's, as the model has it."""
    return model.get_parameter(name if is_projection(model, name) else f"{name}.weight")


def holder(model, name: str) -> nn.Module:
    """A linear layer, or the experts that a projection is of."""
    return model.get_submodule(name.rpartition(".")[0] if is_projection(model, name) else name)


def replace_modules(model, replacements: dict[str, nn.Module]) -> None:
    """Puts modules in place of those with the given names, wherever else in the model the same ones stand; projections
    in place of the tensors of experts."""
    new = {}
    for name, module in replacements.items():
        if is_projection(model, name):
            experts.put(model, name, module)
        else:
            new[model.get_submodule(name)] = module
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in new:
                parent._modules[name] = new[child]


def choose(model, config: KbitConfig) -> dict[str, int]:
    """``{name: bits}`` of the layers and projections to quantize, in the order of the model.

    Raises:
        ValueError: a pattern of ``module_bits`` names no linear layer or experts, or what cannot be quantized.
    """
    names = packable(model)
    for pattern in config.module_bits:
        if not any(matches(name, pattern) for name in names):
            found = f"found no linear layer or experts of that name in {type(model).__name__}"
            raise ValueError(f"module_bits[{pattern!r}]: {found}")
    reasons, chosen = skips(model), {}
    for name in names:
        bits, reason = config.bits_for(name), reasons.get(name)
        asked_for = any(b is not None and matches(name, pattern) for pattern, b in config.module_bits.items())
        if bits is not None and asked_for and reason == "fixed":
            raise ValueError(
                f"{name}: module_bits asks for {bits} bits, but {type(model).__name__} ties its weight or keeps it in "
                "float32"
            )
        if bits is not None and (
            asked_for or reason is None or (reason == "head" and not config.skip_default_modules)
        ):
            chosen[name] = bits
    return chosen
