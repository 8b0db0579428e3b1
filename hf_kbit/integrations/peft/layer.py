"""PEFT's adapter layers over a ``KbitLinear``: how they see it, and how they merge into it."""

import functools

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn

from hf_kbit.integrations.peft.merge_report import MergedLayer, report
from hf_kbit.integrations.transformers.quantizer import to_dense
from hf_kbit.nn.linear import KbitLinear


class KbitTunerLayer:
    """Put before PEFT's class of a layer whose base layer is a ``KbitLinear``: merges by requantizing.

    ``name`` is that in the model; ``merge_dtype`` other than None has ``merge`` leave a dense layer of it. While
    adapters are merged, ``unmerged`` keeps what was there before, to restore the very same bytes: that takes the
    memory of the packed weight a second time.
    """

    name: str
    merge_dtype: torch.dtype | None = None
    unmerged: tuple[KbitLinear] | tuple[()] = ()  # a tuple, for nn.Module would register the layer

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight, and quantizes it again; takes some float32 copies of the weight meanwhile.

        Args:
            safe_merge: has PEFT look for NaN; a weight that is not finite is refused without it too.
            adapter_names: None for the active ones.

        Raises:
            ValueError: a merged weight holds NaN or infinity. The layer is then what it was before.
        """
        base = self.base_layer
        if not isinstance(base, KbitLinear):  # PEFT's code, at work on the decoded weight, calls back
            return super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
        adapter_names = check_adapters_to_merge(self, adapter_names)
        if not adapter_names and self.merge_dtype is None:
            return
        # All of them anew on what was there before any: rounded once, not once for each.
        merged, (original,) = self.merged_adapters, self.unmerged or (_twin(base),)
        if original.weight.device != base.weight.device:  # the model was moved meanwhile
            original.to(base.weight.device)
        exact, measured = dense(original), None
        self.base_layer, self.merged_adapters = exact, []
        try:
            super().merge(safe_merge=safe_merge, adapter_names=merged + adapter_names)
            if self.merge_dtype is not None:
                self.base_layer = to_dense(base, self.merge_dtype, exact)
                if not self.base_layer.weight.isfinite().all():
                    raise ValueError(
                        f"{self._what()}: found NaN or infinite values, expected finite ones in {self.merge_dtype}"
                    )
            else:
                self.base_layer = base
                if self.merged_adapters != merged:  # this layer has at least one of the adapters
                    measured = self._take(original, exact)
        except Exception:
            self.base_layer, self.merged_adapters = base, merged
            raise
        if measured is not None:
            report(measured)

    def _take(self, original: KbitLinear, exact: nn.Linear) -> MergedLayer:
        """Quantizes the merged layer, and measures what that changed."""
        base, before = self.base_layer, original.dequantize(torch.float32)
        if torch.equal(before, exact.weight):
            _restore(base, original)
        else:
            requantize(base, exact.weight, self._what())
        if base.bias is not None:
            base.bias = nn.Parameter(exact.bias.data.to(base.bias.dtype), base.bias.requires_grad)
        self.unmerged = (original,)
        return MergedLayer.measure(self.name, before, exact.weight, base)

    def _what(self) -> str:
        return f"{self.name}.weight with {', '.join(self.merged_adapters)} merged"

    def unmerge(self) -> None:
        """Restores the weight from before ``merge``, byte for byte.

        Raises:
            ValueError: the weight is offloaded; ``unmerge_adapter()`` of the model brings it in.
        """
        base = self.base_layer
        if not isinstance(base, KbitLinear) or not self.unmerged:
            return super().unmerge()
        if base.weight.is_meta:
            raise ValueError(
                f"{self.name}.weight: found it offloaded, expected it on a device to unmerge: call unmerge_adapter() "
                "of the model before disabling adapters"
            )
        _restore(base, self.unmerged[0])
        self.merged_adapters, self.unmerged = [], ()

    def get_delta_weight(self, *args, **kwargs):
        """What an adapter adds to the weight; PEFT looks at the shape of the base layer's for it."""
        base = self.base_layer
        if not isinstance(base, KbitLinear):
            return super().get_delta_weight(*args, **kwargs)
        self.base_layer = stand_in(base)
        try:
            return super().get_delta_weight(*args, **kwargs)
        finally:
            self.base_layer = base

    def _cast_input_dtype(self, x, dtype):
        """PEFT's cast to the adapter's float32, but where autocast would undo it in the next product."""
        if x is not None and torch.is_autocast_enabled(x.device.type):
            if x.dtype == torch.get_autocast_dtype(x.device.type):
                return x
        return super()._cast_input_dtype(x, dtype)

    def __reduce_ex__(self, protocol):
        return _new_tuner_layer, (type(self).__mro__[2],), self.__dict__


@functools.cache
def tuner_class(plain: type[BaseTunerLayer]) -> type[KbitTunerLayer]:
    method = plain.__module__.split(".")[-2].capitalize()
    # No slots, that is nothing in memory that the plain class has not: so Python lets an object change to this class.
    return type(f"Kbit{method}{plain.__name__}", (KbitTunerLayer, plain), {"__module__": __name__, "__slots__": ()})


def _new_tuner_layer(plain: type[BaseTunerLayer]) -> KbitTunerLayer:
    """An empty one, for copies and pickles: the derived classes are in no module, where pickle would look."""
    layer_class = tuner_class(plain)
    return layer_class.__new__(layer_class)


# --- a KbitLinear as PEFT sees it -----------------------------------------------------------------


def _linear(layer: KbitLinear, weight: torch.Tensor) -> nn.Linear:
    """An ``nn.Linear`` with a weight of the layer's size, frozen, and a copy of its bias."""
    linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta").train(layer.training)
    # By the dictionary, for PEFT's low_cpu_mem_usage turns every parameter that is set into a meta tensor.
    linear._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        linear._parameters["bias"] = nn.Parameter(layer.bias.data.to(weight.dtype, copy=True), requires_grad=False)
    return linear


def dense(layer: KbitLinear) -> nn.Linear:
    """The decoded layer, in float32."""
    return _linear(layer, layer.dequantize(torch.float32))


def stand_in(layer: KbitLinear) -> nn.Linear:
    """Shape, dtype and device of the decoded layer without its memory: NaN, so that no reading goes unnoticed."""
    nan = torch.full((), torch.nan, dtype=layer.dense_dtype, device=layer.weight.device)
    return _linear(layer, nan.expand(layer.out_features, layer.in_features))


def _twin(layer: KbitLinear) -> KbitLinear:
    """Another layer with the same tensors, to keep them when the layer gets others."""
    twin = KbitLinear.__new__(KbitLinear)
    own = {"_parameters": dict(layer._parameters), "_buffers": dict(layer._buffers)}
    twin.__dict__.update(layer.__dict__ | own)
    return twin


def _restore(layer: KbitLinear, twin: KbitLinear) -> None:
    """Gives the layer the tensors of its twin, where and in the form that the layer's are."""
    tiled, device = layer.is_tiled, layer.weight.device
    twin.to(device)
    layer._parameters.update(twin._parameters)
    layer.decode_as(twin.decoding)
    layer.settle(device)
    if not tiled:
        layer.to_planes()


def requantize(layer: KbitLinear, weight: torch.Tensor, name: str) -> None:
    """Quantizes another weight into the layer, in the form in which its own is: one that is offloaded has planes."""
    tiled = layer.is_tiled
    layer.load_dense(weight.data, name)
    if not tiled:
        layer.to_planes()
