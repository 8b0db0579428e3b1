"""PEFT's adapter layers over a packed weight: how they merge into it, and how they are undone."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from peft.utils.quantization_utils import QuantizationBackend
from torch import nn

from hf_kbit.format.reference import matrices
from hf_kbit.integrations.peft.merge_report import measure, report
from hf_kbit.nn.dense import to_dense
from hf_kbit.nn.weight import KbitWeight, is_sharded, local
from hf_kbit.weight.tensor import KbitTensor, as_parameter


class KbitBackend(QuantizationBackend):
    """PEFT's view of the format, as in ``model.get_model_status()``; merging needs none of it."""

    layer_type, supports_merge, backend_name = "linear", True, "kbit"

    def get_base_weight(self, base_layer: KbitWeight) -> torch.Tensor:
        return base_layer.dequantize()


BACKEND = KbitBackend()


class KbitTunerLayer:
    """Put before PEFT's class of an adapter layer whose base layer is packed: merges by requantizing.

    Attributes:
        name: of the layer in the model.
        merge_dtype: other than None has ``merge`` leave a dense layer of it.
        unmerged: weight and bias from before merging, while adapters are merged: unmerging restores the same bytes.
    """

    name: str = ""
    merge_dtype: torch.dtype | None = None
    unmerged: tuple[KbitTensor, nn.Parameter | None] | tuple[()] = ()

    @property
    def quantized(self) -> KbitWeight | None:
        """What is adapted; None if it is not packed, also while PEFT is at work on the decoded weight."""
        base = self.base_layer
        return base if isinstance(base, KbitWeight) and is_packed(base) else None

    @property
    def quantization_backend(self) -> QuantizationBackend | None:
        return None if self.quantized is None else BACKEND

    def _cast_input_dtype(self, x, dtype):
        """PEFT's cast to the adapter's float32, but where autocast would undo it in the next product."""
        if x is not None and torch.is_autocast_enabled(x.device.type):
            if x.dtype == torch.get_autocast_dtype(x.device.type):
                return x
        return super()._cast_input_dtype(x, dtype)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight, and quantizes it again; takes some float32 copies of the weight meanwhile, of
        experts those of one. If that fails, or gives what is not finite, the layer is what it was before."""
        base = self.quantized
        if base is None:
            return super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
        self.refuse_merge()
        adapter_names = check_adapters_to_merge(self, adapter_names)
        if not adapter_names and self.merge_dtype is None:
            return
        # All of them anew on what was there before any: rounded once, not once for each.
        merged, (before, bias) = self.merged_adapters, self.unmerged or (base.weight, getattr(base, "bias", None))
        before, measured = before.moved(base.weight.device), None  # the model may have been moved meanwhile
        try:
            self.merged_adapters = []
            exact, new_bias = self._merged(before, bias, merged + adapter_names, safe_merge)
            if self.merge_dtype is not None:
                self._leave_plain(exact, new_bias)
            elif self.merged_adapters != merged:  # this layer has at least one of the adapters
                if all(map(torch.equal, before.matrices(torch.float32), matrices(exact))):
                    self._put(before, new_bias)
                else:
                    requantize(base, exact, self._what(), before.columns)
                    self._put(base.weight, new_bias)
                measured = measure(self.name, before, exact, base.weight)
                self.unmerged = before, bias
        except Exception:
            self.merged_adapters = merged
            raise
        if measured is not None:
            report(measured)

    def unmerge(self) -> None:
        """Restores the weight from before ``merge``, byte for byte.

        Raises:
            ValueError: the weight is offloaded; ``unmerge_adapter()`` of the model brings it in.
        """
        base = self.quantized
        if base is None or not self.unmerged:
            return super().unmerge()
        if base.weight.is_meta:
            raise ValueError(
                f"{self.name}.weight: found it offloaded, expected it on a device to unmerge: call unmerge_adapter() "
                "of the model before disabling adapters"
            )
        self._put(*self.unmerged)
        self.merged_adapters, self.unmerged = [], ()

    def refuse_merge(self) -> None:
        """Raises if the weight is in parts, or merging would change, or leave apart, what else has it."""
        if self.quantized is None:
            return
        if is_sharded(self.quantized.weight):
            raise ValueError(
                f"{self.name}.weight: found it sharded over several processes, expected all of it in this one to "
                "merge into it: save the adapters, and load them in one process"
            )
        if self.quantized.tied:
            raise ValueError(
                f"{self.name}.weight: found it tied to a table of embeddings, expected one of its own to merge into: "
                "keep the adapter beside the model, or quantize the model without embedding_bits"
            )

    def _merged(self, weight: KbitTensor, bias, adapter_names: list[str], safe_merge: bool) -> tuple:
        """Weight and bias, in float32, into which PEFT has merged those adapters that the layer has."""
        base = self.quantized
        with showing(base, weight.dequantize(torch.float32), bias):
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
            return base.weight.data, getattr(base, "bias", None)

    def _leave_plain(self, weight, bias) -> None:
        """Puts what ``_merged`` gives in the place of the packed weight, in ``merge_dtype``."""
        weight = weight.to(self.merge_dtype)
        self._check(weight)
        to_dense(self.base_layer, self.merge_dtype, weight, bias)

    def _put(self, weight: KbitTensor, bias: nn.Parameter | None) -> None:
        base = self.quantized
        base.weight = as_parameter(weight.moved(base.weight.device, base.dense_dtype))
        if bias is not None and getattr(base, "bias", None) is not None:
            base.bias = nn.Parameter(bias.data.to(base.bias), base.bias.requires_grad)

    def _check(self, weight: torch.Tensor) -> None:
        if not weight.isfinite().all():
            raise ValueError(f"{self._what()}: found NaN or infinite values, expected finite ones in {weight.dtype}")

    def _what(self) -> str:
        return f"{self.name}.weight with {', '.join(self.merged_adapters)} merged"

    def __reduce_ex__(self, protocol):
        return _new_tuner_layer, (type(self).__mro__[2],), self.__dict__


@functools.cache
def tuner_class(plain: type[BaseTunerLayer]) -> type[KbitTunerLayer]:
    """The class of what was of a class of PEFT, or of the user's own."""
    method = "".join(plain.__module__.split(".")[-2:-1]).capitalize()  # a class of a script is in no package
    # No slots, that is nothing in memory that the plain class has not: so Python lets an object change to this class.
    return type(f"Kbit{method}{plain.__name__}", (KbitTunerLayer, plain), {"__module__": __name__, "__slots__": ()})


def _new_tuner_layer(plain: type[BaseTunerLayer]) -> KbitTunerLayer:
    """An empty one, for copies and pickles: the derived classes are in no module, where pickle would look."""
    layer_class = tuner_class(plain)
    return layer_class.__new__(layer_class)


# --- weights of a packed layer --------------------------------------------------------------------


def is_packed(layer: KbitWeight) -> bool:
    """Whether its weight is the packed one, and not one that it shows meanwhile."""
    return isinstance(local(layer.weight), KbitTensor)


@contextmanager
def showing(layer: KbitWeight, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Iterator[None]:
    """Inside, a layer has a dense weight, and a copy of a bias in its dtype, for code of PEFT that changes them."""
    own = dict(layer._parameters)
    # By the dictionary, for PEFT's low_cpu_mem_usage turns every parameter that is set into a meta tensor.
    layer._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer._parameters["bias"] = nn.Parameter(bias.data.to(weight, copy=True), requires_grad=False)
    try:
        yield
    finally:
        layer._parameters.update(own)


def no_weight(layer: KbitWeight) -> torch.Tensor:
    """Shape ``[*lead, N, K]``, dtype and device of the decoded weight without its memory: NaN, so that no reading goes
    unnoticed. The device is the one that the layer computes on, also where its weight is offloaded."""
    device = layer.weight.device
    if layer.weight.is_meta and getattr(getattr(layer, "_hf_hook", None), "execution_device", None) is not None:
        device = layer._hf_hook.execution_device
    nan = torch.full((), torch.nan, dtype=layer.dense_dtype, device=device)
    return nan.expand(*layer.lead, layer.out_features, layer.in_features)


def requantize(layer: KbitWeight, weight, name: str, columns: torch.Tensor | None = None) -> None:
    """Quantizes another weight (``reference.matrices``) into the layer. With the column scales that its own has, what
    is hardly changed is not rounded anew."""
    if columns is not None:  # zeros are those of a layer that never had a weight
        columns = columns.to(weight.device) if columns.all() else None
    layer.load_dense(weight, name, columns)
