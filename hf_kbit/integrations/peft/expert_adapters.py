"""LoRA on the packed experts of a mixture: PEFT's ``target_parameters``, without ever making ``W`` or what is added.

PEFT adapts a tensor of experts by a ``ParamWrapper`` around their module, one around the other where it adapts two,
and in each forward adds ``B @ A`` of all experts to the tensor. ``KbitParamWrapper`` leaves the weight alone, and has
the projection add ``B_e (A_e x)`` to the tokens of each expert.
"""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.nn import functional as F

from hf_kbit.integrations.peft.layer import KbitTunerLayer, no_weight
from hf_kbit.nn.experts import KbitExperts, KbitProjection
from hf_kbit.nn.site import site_of, unpack, unpacked
from hf_kbit.nn.weight import is_sharded
from hf_kbit.ops.grouped import has_grouped_product
from hf_kbit.weight.tensor import KbitTensor

# Those of LoRA that ParamWrapper knows and that do not look at the weight.
INITIALISATIONS = (True, False, "gaussian")

# What no grouped product can do, and ParamWrapper refuses in other words.
REFUSED = ("lora_dropout", "use_dora", "lora_bias", "fan_in_fan_out", "velora_config", "kasa_config")


class KbitParamWrapper(KbitTunerLayer, ParamWrapper):
    """LoRA on one projection of packed experts. Its parameters are those of PEFT's ``ParamWrapper``:

    - ``lora_A[adapter].weight``: floating ``[E * r, K]``, r rows of an expert beside each other,
    - ``lora_B[adapter].weight``: floating ``[N, r * E]``, column ``j * E + e`` is column j of expert e,

    where for Llama 4's experts, as in PEFT, K and N change places.
    """

    @property
    def quantized(self) -> KbitProjection | None:
        projection = getattr(self.get_base_layer(), self.parameter_name)
        return projection if isinstance(projection, KbitProjection) else None

    def get_param(self) -> torch.Tensor:
        projection = self.quantized
        return super().get_param() if projection is None else _in_model_order(projection, no_weight(projection))

    def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """What active adapters add goes through the call, where no other thread sees it."""
        if self.quantized is None:
            return super().forward(x, *args, **kwargs)
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        if self.disable_adapters and self.merged:
            self.unmerge()
        active = [name for name in self.active_adapters if name in self.lora_A]
        if active and not (self.disable_adapters or self.merged):
            adapters = {**kwargs.get("adapters", {}), self.parameter_name: partial(self._added, active)}
            kwargs["adapters"] = adapters
        return self.base_layer(x, *args, **kwargs)

    def _added(self, adapters: list[str], x: torch.Tensor, rows: torch.Tensor | None, offsets) -> torch.Tensor:
        """``[R, N]``, see ``KbitProjection.forward``."""
        x = x if rows is None else x[rows]
        return sum(low_rank_product(x, *self._factors(name), offsets, self.scaling[name]) for name in adapters)

    def _factors(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A ``[E, r, K]``, and B ``[E, r, N]``."""
        count, rank = self.num_experts, self.r[adapter]
        a = self.lora_A[adapter].weight.view(count, rank, -1)
        b = self.lora_B[adapter].weight.view(-1, rank, count).permute(2, 1, 0)
        if self.quantized.transposed and self._did_swap_in_out_features:  # PEFT takes Llama 4's tensors for [E, N, K]
            return b, a
        return a, b

    def refuse_merge(self) -> None:
        super().refuse_merge()
        # PEFT would bring in what is below a layer's own base layer, and then drop what became of it.
        if self.quantized is not None and self.quantized.weight.is_meta:
            raise ValueError(f"{self.name}.weight: found it offloaded, expected it on a device to merge into it")

    def _merged(self, weight: KbitTensor, bias, adapter_names: list[str], safe_merge: bool) -> tuple:
        self.merged_adapters = [name for name in adapter_names if name in self.lora_A]
        added = [(*self._factors(name), self.scaling[name]) for name in self.merged_adapters]
        return MergedExperts(weight, added), None

    def _leave_plain(self, exact: "MergedExperts", bias) -> None:
        order = _in_model_order(self.quantized, no_weight(self.quantized))
        tensor = torch.empty(order.shape, dtype=self.merge_dtype, device=exact.device)
        for own, matrix in zip(tensor, exact, strict=True):
            self._check(own.copy_(_in_model_order(self.quantized, matrix)))
        unpack(site_of(self.get_base_layer(), self.parameter_name), nn.Parameter(tensor, requires_grad=False))

    __reduce_ex__ = object.__reduce_ex__  # pickle finds this class by its name


class MergedExperts:
    """The weight ``[E, N, K]`` of a projection with adapters added, float32: a matrix is made when it is gone through
    (``reference.matrices``), each time anew, for all of them are several times the size of the model's. ``added``: of
    each adapter A ``[E, r, K]``, B ``[E, r, N]``, and what to multiply ``B_e.T @ A_e`` by."""

    def __init__(self, weight: KbitTensor, added: list[tuple[torch.Tensor, torch.Tensor, float]]):
        self.shape, self.device, self._weight = weight.whole_shape, weight.device, weight
        self._added = [(a.detach(), b.detach(), scaling) for a, b, scaling in added]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for expert, matrix in enumerate(self._weight.matrices(torch.float32)):
            for a, b, scaling in self._added:
                matrix += (b[expert].T @ a[expert] * scaling).to(matrix)  # in the adapter's dtype, as PEFT does
            yield matrix


def _in_model_order(projection: KbitProjection, tensor: torch.Tensor) -> torch.Tensor:
    """``[*, N, K]`` in the order of the model, and back."""
    return tensor.mT if projection.transposed else tensor


def low_rank_product(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, scaling: float = 1.0
) -> torch.Tensor:
    """``scaling * x[i] @ a[e].T @ b[e]`` for the rows i of expert e, in the dtype of x, without waiting for a GPU.

    ``x`` ``[R, K]`` is sorted by expert, ``a`` is ``[E, r, K]``, ``b`` ``[E, r, N]``; ``offsets`` int32 ``[E + 1]``
    say where the rows of each expert begin, and the last ones end. Where torch has no grouped product that suits, all
    experts multiply all rows, and what is not of a row's own expert is zero: E times the arithmetic.
    """
    count, rank, unit = len(a), a.shape[1], 16 // x.element_size()
    a, b = a.to(x.dtype), b.to(x.dtype)
    if has_grouped_product(x) and not (x.shape[1] % unit or b.shape[2] % unit):
        if short := -rank % unit:  # rows of ``hidden`` must begin at multiples of 16 bytes
            a, b = (F.pad(factor, (0, 0, 0, short)) for factor in (a, b))
        hidden = F.grouped_mm(x, a.contiguous().mT, offs=offsets[1:])
        return F.grouped_mm(scaling * hidden, b.contiguous(), offs=offsets[1:])
    hidden = scaling * (x @ a.reshape(count * rank, -1).T).view(-1, count, rank)
    numbers = torch.arange(len(x), device=x.device)[:, None]
    own = (numbers >= offsets[:-1]) & (numbers < offsets[1:])
    return hidden.masked_fill(~own[:, :, None], 0).view(-1, count * rank) @ b.reshape(count * rank, -1)


# --- creating -------------------------------------------------------------------------------------


@contextmanager
def shown_in_16_bits(model: nn.Module) -> Iterator[dict[nn.Module, dict[str, KbitProjection]]]:
    """Inside, experts have their own class, and tensors without memory in the place of their projections, and adapters
    PEFT's own class, until they are adopted; gives the projections of each module of experts, by the tensor's name."""
    packed = {
        experts: {own: part for own, part in experts.named_children() if isinstance(part, KbitProjection)}
        for experts in model.modules()
        if isinstance(experts, KbitExperts)
    }
    for module in model.modules():
        if isinstance(module, ParamWrapper) and isinstance(module, KbitTunerLayer):
            module.__class__ = ParamWrapper
    with ExitStack() as stack:
        for experts, projections in packed.items():
            for own, projection in projections.items():
                tensor = _in_model_order(projection, no_weight(projection))
                stack.enter_context(unpacked(site_of(experts, own), nn.Parameter(tensor, requires_grad=False)))
        yield packed


def check_config(config, name: str, projection: KbitProjection) -> None:
    """Refuses what PEFT refuses on tensors, and initialisations that read the weight."""
    what = f"{name}: experts of {projection.bits} bits, adapted by target_parameters"
    for setting in REFUSED:
        if found := getattr(config, setting, None):
            raise ValueError(f"{what}: found {setting}={found!r}, expected none: PEFT has it for linear layers only")
    if (init := config.init_lora_weights) not in INITIALISATIONS:
        raise ValueError(f"{what}: found init_lora_weights={init!r}, expected one of {list(INITIALISATIONS)}")
    if is_sharded(projection.weight):
        raise ValueError(
            f"{what}: found them sharded over several processes, expected all experts in each: PEFT has no adapters "
            "for parts of them"
        )


def tell_of_experts(model: nn.Module, adapter: str) -> None:
    """Warns of what an adapter has on experts that were not named: PEFT makes that of some ``target_modules``."""
    wrappers = (module for module in model.modules() if isinstance(module, KbitParamWrapper))
    factors = (factor for wrapper in wrappers for factor in (wrapper.lora_A, wrapper.lora_B) if adapter in factor)
    if count := sum(factor[adapter].weight.numel() for factor in factors):
        warnings.warn(
            f"hf_kbit: target_modules takes the experts too, as PEFT has it for this model: {count:,} parameters of "
            f"adapter {adapter!r} are on them, {16 * count / 1e9:.3g} GB in float32 with gradients and AdamW. To "
            "choose, name the linear layers in target_modules, and tensors of experts in target_parameters",
            stacklevel=4,
        )
