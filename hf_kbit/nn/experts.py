"""The experts of a mixture with packed weights: KbitProjection holds a projection of all experts, KbitExperts runs it.

A mixture's experts are one module of Transformers, with a tensor ``[E, N, K]`` for each projection. That module stays
what it was, with its class's own gate, but each such tensor becomes a ``KbitProjection``, and its class one derived
from its own and from ``KbitExperts``, whose forward multiplies all tokens by the experts they are sent to.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from hf_kbit.nn.classes import Changed, changed
from hf_kbit.nn.product import KbitProduct
from hf_kbit.nn.weight import local
from hf_kbit.ops import can_round, combine_experts, gemm_experts_int8, route_experts
from hf_kbit.ops.grouped import dense_product
from hf_kbit.weight.packing import Recipe
from hf_kbit.weight.tensor import KbitTensor, as_parameter
from hf_kbit.weight.tensor_ops import cast_for_autocast

LLAMA4 = "Llama4TextExperts"
UP_PROJECTIONS, DOWN_PROJECTION = ("gate_up_proj", "up_proj"), "down_proj"
DEFAULT_GATE = "_default_apply_gate"  # name of the method that classes of Transformers without one get

# By the names of projections, what adapters make of x, rows and offsets to add to their products.
Adapters = Mapping[str, Callable[..., torch.Tensor]]
NO_ADAPTERS: Adapters = {}


class KbitProjection(KbitProduct):
    """One projection of all E experts of a mixture: ``y[i] = x[rows[i]] @ W[e].T + bias[e]`` for the rows of expert e.

    Its weight is ``[E, N, K]``. The experts have their input in common, and so their column scales. K is what a
    product sums over, whatever the order in the model (``transposed``).

    Args:
        num_experts: E.
        in_features: K.
        out_features: N.
        settings: all others of ``KbitWeight``.

    Attributes:
        inputs: as of ``KbitProduct``.

    >>> projection = KbitProjection(4, in_features=64, out_features=48, bits=3)
    >>> projection.load_dense(torch.randn(4, 48, 64))
    >>> projection(torch.randn(5, 64), None, torch.tensor([0, 2, 2, 4, 5], dtype=torch.int32)).shape
    torch.Size([5, 48])
    """

    def __init__(self, num_experts: int, in_features: int, out_features: int, **settings: Any):
        super().__init__({"in_features": in_features, "out_features": out_features}, lead=(num_experts,), **settings)

    @classmethod
    def of(cls, weight: KbitTensor, recipe: Recipe, transposed: bool) -> "KbitProjection":
        """One of a packed weight ``[E, N, K]``; ``transposed``: the model has it as ``[E, K, N]``."""
        experts, rows, width = weight.shape
        self = cls(experts, width, rows, device="meta", dtype=weight.dtype)
        self.recipe, self.transposed = recipe, transposed
        self.weight = weight if isinstance(weight, nn.Parameter) else as_parameter(weight)
        return self

    def forward(
        self,
        x: torch.Tensor,
        rows: torch.Tensor | None,
        offsets: torch.Tensor,
        bias: torch.Tensor | None = None,
        swiglu: bool = False,
        adapter: Callable[..., torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """``x`` floating ``[T, K]`` (``[T, 2 K]`` with ``swiglu``) to ``[R, N]`` of the same dtype, or of autocast's;
        see ``ops.gemm_experts``. ``adapter`` makes of x, rows and offsets what is added to the product."""
        if is_dynamo_compiling():
            parts = self.parts
        else:
            # Nothing communicates around a projection, which would put shards in the place of DTensors.
            weight = local(self._parameters.get("weight"))
            parts = self.__dict__["parts"] = getattr(weight, "parts", None)
        if parts is None:  # somebody has put dense matrices into its place
            y = dense_product(x if rows is None else x[rows], self.weight, bias, offsets, transposed=False)
            return y if adapter is None else y + adapter(x, rows, offsets)
        rows_of_weight, in_features = parts["matrix"]
        columns, width = parts.get("columns"), 2 * in_features if swiglu else in_features
        try:
            if not x.is_floating_point() or x.shape[-1:] != (width,):
                self.refuse(x, width)
            x = cast_for_autocast(x)
            bias = None if bias is None else bias.to(x.dtype)
            rounds = self.inputs is not None and not self.training and can_round(x, bias)
            if columns is None or not rounds:
                kind = parts["kind"]
                multiply = kind.experts_product_int8 if rounds else kind.experts_product
                y = multiply(x, parts, bias, rows, offsets, swiglu)
            else:
                how = bias, rows, offsets, rows_of_weight, columns, self.find_inverses(parts), swiglu
                y = gemm_experts_int8(x, parts["words"], parts["absmax"], parts["codebook"], *how)
        except (TypeError, ValueError, RuntimeError) as error:
            self.fail(error)
        return y if adapter is None else y + adapter(x, rows, offsets)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if self.awaits_dense:  # Transformers looks up where to load it by the name of the tensor
            destination[prefix.removesuffix(".")] = self.weight
        else:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def extra_repr(self) -> str:
        sizes = f"num_experts={self.lead[0]}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bits={self.bits if self.is_packed else None}"


class KbitExperts(Changed, nn.Module):
    """Put before the class of a mixture's experts, whose projections are packed: all of them, or some.

    Tokens are sorted by expert, on their own device and without waiting for it; each projection is one product, with
    the usual gate on the way into the second; the results of a token are weighted and added up in float32, always in
    the same order.
    """

    def forward(self, *args, adapters: Adapters = NO_ADAPTERS, **kwargs) -> torch.Tensor:
        """Arguments as of the class itself: hidden states ``[*, H]``, experts ``[*, k]`` of each token and their
        weights ``[*, k]``. The number E stands for an expert of another process, whose product is zero here."""
        hidden_states, experts, weights = arguments(type(self).plain, args, kwargs)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        # The class's own number, of which expert parallelism leaves each process a part.
        rows, places, offsets = route_experts(experts.reshape(-1, experts.shape[-1]), self.num_experts)
        (up,) = (name for name in UP_PROJECTIONS if hasattr(self, name))
        hidden = self._project(up, x, rows, offsets, adapters)
        swiglu = self._is_swiglu() and self._takes_gate(adapters)
        if not swiglu:  # else on the way into the next product
            hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
        y = self._project(DOWN_PROJECTION, hidden, None, offsets, adapters, swiglu)
        if getattr(self, "has_post_expert_norm", False):
            y = self.post_expert_norm(y)
        weights = weights.reshape(places.shape)
        y = combine_experts(y, places, weights if weights.dtype == y.dtype else weights.float())
        return y.to(hidden_states.dtype).view(hidden_states.shape)

    def _is_swiglu(self) -> bool:
        """Whether the class's gate is Transformers' usual one, with its usual function."""
        # Of a bound method torch 2.11 finds no name while it compiles.
        gate = vars(self).get("_apply_gate", getattr(type(self), "_apply_gate", None))
        return self.has_gate and getattr(gate, "__name__", "") == DEFAULT_GATE and _is_silu(self.act_fn)

    def _takes_gate(self, adapters: Adapters) -> bool:
        """Whether the second product makes the gate itself; an adapter beside it has to see what comes out."""
        return isinstance(self.down_proj, KbitProjection) and DOWN_PROJECTION not in adapters

    def _project(self, name: str, x, rows, offsets, adapters: Adapters, swiglu: bool = False) -> torch.Tensor:
        """One product; with ``swiglu``, which packed projections alone know, as adapters, of what the gate makes of
        x."""
        bias = getattr(self, f"{name}_bias") if self.has_bias else None
        projection = getattr(self, name)
        if isinstance(projection, nn.Module):
            known = ({"swiglu": True} if swiglu else {}) | ({"adapter": adapters[name]} if name in adapters else {})
            return projection(x, rows, offsets, bias, **known)
        return dense_product(x if rows is None else x[rows], projection, bias, offsets, self.is_transposed)


class KbitLlama4Experts(KbitExperts):
    """Put before the class of Llama 4's experts, each of which gets all tokens, weighted before."""

    has_gate, has_bias, is_transposed = True, False, True

    def forward(self, hidden_states: torch.Tensor, adapters: Adapters = NO_ADAPTERS) -> torch.Tensor:
        """``[E * T, H]`` to the same shape: T rows for each expert."""
        tokens = hidden_states.shape[0] // self.num_experts
        offsets = tokens * torch.arange(self.num_experts + 1, dtype=torch.int32, device=hidden_states.device)
        hidden = self._project(UP_PROJECTIONS[0], hidden_states, None, offsets, adapters)
        swiglu = _is_silu(self.act_fn) and self._takes_gate(adapters)
        if not swiglu:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = up * self.act_fn(gate)
        return self._project(DOWN_PROJECTION, hidden, None, offsets, adapters, swiglu)


def _is_silu(function) -> bool:
    """Whether it is torch's or Transformers', and nobody has hooks on it, which want it to be called."""
    known = type(function).__name__ in ("SiLU", "SiLUActivation")
    return known and not (function._forward_hooks or function._forward_pre_hooks)


def arguments(experts: type, args: tuple, kwargs: dict) -> tuple[torch.Tensor, ...]:
    """The three arguments of a class's forward, whatever it calls them."""
    if len(args) == 3 and not kwargs:
        return args
    names = _names(experts)
    given = dict(zip(names, args, strict=False)) | kwargs
    return tuple(given[name] for name in names)


@functools.cache
def _names(experts: type) -> tuple[str, ...]:
    return tuple(inspect.signature(experts.forward).parameters)[1:4]


def experts_class(plain: type[nn.Module]) -> type[KbitExperts]:
    """The class of experts with packed projections that were of class ``plain``."""
    return changed(plain, KbitLlama4Experts if plain.__name__ == LLAMA4 else KbitExperts)
