"""PEFT's adapter layers over a packed weight: how they see it, and how they merge into it."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from peft.utils.quantization_utils import QuantizationBackend
from torch import nn

from hf_kbit.integrations.peft.merge_report import MergedLayer, report
from hf_kbit.integrations.transformers.dense import to_dense
from hf_kbit.nn.embedding import KbitEmbedding
from hf_kbit.nn.linear import KbitLinear
from hf_kbit.nn.weight import KbitWeight, is_sharded
from hf_kbit.reference import matrices

ADAPTED = KbitLinear, KbitEmbedding  # what PEFT sees as the dense layer that it was


class KbitTunerLayer:
    """Put before PEFT's class of a layer whose base layer is one of ``ADAPTED``: merges by requantizing.

    What is over the experts of a mixture is derived from it (``peft/experts.py``). ``name`` is that in the model;
    ``merge_dtype`` other than None has ``merge`` leave a dense layer of it. While adapters are merged, ``unmerged``
    keeps what was there before, to restore the very same bytes: that takes the memory of the packed weight a second
    time.
    """

    name: str
    merge_dtype: torch.dtype | None = None
    unmerged: tuple[KbitWeight] | tuple[()] = ()  # a tuple, for nn.Module would register the layer

    @property
    def quantized(self) -> KbitWeight | None:
        """What is adapted; None if it is not packed, also while PEFT's code is at work on the decoded weight."""
        return self.base_layer if isinstance(self.base_layer, ADAPTED) else None

    def _as_plain(self, packed: KbitWeight, weight: torch.Tensor) -> nn.Module:
        """A base layer as PEFT knows it, with this weight ``[*lead, N, K]``."""
        return plain_layer(packed, weight)

    def _merged(self, original: KbitWeight, adapter_names: list[str], safe_merge: bool) -> nn.Module:
        """A base layer as PEFT knows it, in float32, into which it has merged those adapters that the layer has."""
        exact = self._as_plain(original, original.dequantize(torch.float32))
        with base_layer_as(self, exact):
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
        return exact

    def _weight_of(self, exact):
        """The weight of what ``_merged`` gives, to go through (``reference.matrices``)."""
        return exact.weight

    def _leave_plain(self, exact) -> None:
        """Puts what ``_merged`` gives in the place of the packed weight, in ``merge_dtype``."""
        self._check(exact.weight.to(self.merge_dtype))
        self.base_layer = to_dense(self.base_layer, self.merge_dtype, exact)

    def _check(self, weight: torch.Tensor) -> None:
        if not weight.isfinite().all():
            raise ValueError(f"{self._what()}: found NaN or infinite values, expected finite ones in {weight.dtype}")

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight, and quantizes it again; takes some float32 copies of the weight meanwhile, of
        experts those of one.

        Args:
            safe_merge: has PEFT look for NaN; a weight that is not finite is refused without it too.
            adapter_names: None for the active ones.

        Raises:
            ValueError: a merged weight holds NaN or infinity, or the weight is sharded over several processes, or tied
                to a table. The layer is then what it was before.
        """
        base = self.quantized
        if base is None:
            return super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
        if is_sharded(base.weight):
            raise ValueError(
                f"{self.name}.weight: found it sharded over several processes, expected all of it in this one to "
                "merge into it: save the adapters, and load them in one process"
            )
        adapter_names = check_adapters_to_merge(self, adapter_names)
        if not adapter_names and self.merge_dtype is None:
            return
        self.refuse_tied()
        # All of them anew on what was there before any: rounded once, not once for each.
        merged, (original,) = self.merged_adapters, self.unmerged or (_twin(base),)
        if original.weight.device != base.weight.device:  # the model was moved meanwhile
            original.to(base.weight.device)
        measured = None
        try:
            self.merged_adapters = []
            exact = self._merged(original, merged + adapter_names, safe_merge)
            if self.merge_dtype is not None:
                self._leave_plain(exact)
            elif self.merged_adapters != merged:  # this layer has at least one of the adapters
                measured = self._take(original, exact)
        except Exception:
            self.merged_adapters = merged
            raise
        if measured is not None:
            report(measured)

    def refuse_tied(self) -> None:
        """Raises if merging would change, or leave apart, what else has the weight."""
        if self.quantized is not None and self.quantized.tied:
            raise ValueError(
                f"{self.name}.weight: found it tied to a table of embeddings, expected one of its own to merge into: "
                "keep the adapter beside the model, or quantize the model without embedding_bits"
            )

    def _take(self, original: KbitWeight, exact) -> MergedLayer:
        """Quantizes what ``_merged`` gives, and measures what that changed."""
        base, weight = self.quantized, self._weight_of(exact)
        if all(map(torch.equal, original.matrices(torch.float32), matrices(weight))):
            _restore(base, original)
        else:
            requantize(base, weight, self._what(), original.weight_columns)
        if getattr(base, "bias", None) is not None:
            base.bias = nn.Parameter(exact.bias.data.to(base.bias.dtype), base.bias.requires_grad)
        self.unmerged = (original,)
        return MergedLayer.measure(self.name, original, weight, base)

    def _what(self) -> str:
        return f"{self.name}.weight with {', '.join(self.merged_adapters)} merged"

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
        _restore(base, self.unmerged[0])
        self.merged_adapters, self.unmerged = [], ()

    def get_delta_weight(self, *args, **kwargs):
        """What an adapter adds to the weight; PEFT looks at the shape of the base layer's for it."""
        base, get = self.quantized, super().get_delta_weight
        if base is None:
            return get(*args, **kwargs)
        return get.__func__(Over(self, self._as_plain(base, no_weight(base))), *args, **kwargs)

    @property
    def quantization_backend(self) -> QuantizationBackend | None:
        """What PEFT knows the base layer's format by, as in ``model.get_model_status()``."""
        return None if self.quantized is None else BACKEND

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
    method = "".join(plain.__module__.split(".")[-2:-1]).capitalize()  # a class of a script is in no package
    # No slots, that is nothing in memory that the plain class has not: so Python lets an object change to this class.
    return type(f"Kbit{method}{plain.__name__}", (KbitTunerLayer, plain), {"__module__": __name__, "__slots__": ()})


def _new_tuner_layer(plain: type[BaseTunerLayer]) -> KbitTunerLayer:
    """An empty one, for copies and pickles: the derived classes are in no module, where pickle would look."""
    layer_class = tuner_class(plain)
    return layer_class.__new__(layer_class)


# --- a packed layer as PEFT sees it ---------------------------------------------------------------


class KbitBackend(QuantizationBackend):
    """PEFT's view of the format. ``KbitTunerLayer.merge`` needs none of it: PEFT merges into a dense layer there."""

    layer_type, supports_merge, backend_name = "linear", True, "kbit"

    def get_base_weight(self, base_layer: KbitWeight) -> torch.Tensor:
        return base_layer.dequantize(torch.float32)

    def set_base_weight(self, peft_layer: KbitTunerLayer, weight_data: torch.Tensor) -> None:
        base = peft_layer.base_layer
        requantize(base, weight_data, f"{peft_layer.name}.weight", base.weight_columns)


BACKEND = KbitBackend()


class Over:
    """An adapter layer over another base layer, for a method of PEFT that a forward calls: the layer itself stays what
    it is, which another thread may be running."""

    def __init__(self, layer: BaseTunerLayer, base: nn.Module):
        self._layer, self.base_layer = layer, base

    def get_base_layer(self) -> nn.Module:
        return self.base_layer

    def __getattr__(self, name: str):
        return getattr(self._layer, name)


@contextmanager
def base_layer_as(layer: BaseTunerLayer, base: nn.Module) -> Iterator[None]:
    """Has an adapter layer stand over another base layer for a while."""
    own, layer.base_layer = layer.base_layer, base
    try:
        yield
    finally:
        layer.base_layer = own


def plain_layer(layer: KbitLinear | KbitEmbedding, weight: torch.Tensor) -> nn.Linear | nn.Embedding:
    """The layer before it was quantized, frozen: with a weight of its size, and a copy of the bias if it has one."""
    if isinstance(layer, KbitEmbedding):
        plain, bias = layer.to_embedding(weight=layer.weight), None
    else:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta").train(layer.training)
        bias = layer.bias
    # By the dictionary, for PEFT's low_cpu_mem_usage turns every parameter that is set into a meta tensor.
    plain._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        plain._parameters["bias"] = nn.Parameter(bias.data.to(weight.dtype, copy=True), requires_grad=False)
    return plain


def dense(layer: KbitLinear | KbitEmbedding) -> nn.Linear | nn.Embedding:
    """The decoded layer, in float32."""
    return plain_layer(layer, layer.dequantize(torch.float32))


def stand_in(layer: KbitLinear | KbitEmbedding) -> nn.Linear | nn.Embedding:
    """Shape, dtype and device of the decoded layer without its memory."""
    return plain_layer(layer, no_weight(layer))


def no_weight(layer: KbitWeight) -> torch.Tensor:
    """Shape ``[*lead, N, K]``, dtype and device of the decoded weight without its memory: NaN, so that no reading goes
    unnoticed.

    The device is the one that the layer computes on: adapters of a layer whose weight is offloaded are not.
    """
    device = layer.weight.device
    if layer.weight.is_meta and getattr(getattr(layer, "_hf_hook", None), "execution_device", None) is not None:
        device = layer._hf_hook.execution_device
    nan = torch.full((), torch.nan, dtype=layer.dense_dtype, device=device)
    return nan.expand(*layer.lead, layer.out_features, layer.in_features)


def _twin(layer: KbitWeight) -> KbitWeight:
    """Another layer with the same tensors, to keep them when the layer gets others."""
    twin = type(layer).__new__(type(layer))
    own = {"_parameters": dict(layer._parameters), "_buffers": dict(layer._buffers)}
    twin.__dict__.update(layer.__dict__ | own)
    return twin


def _restore(layer: KbitWeight, twin: KbitWeight) -> None:
    """Gives the layer the tensors of its twin, where and in the form that the layer's are."""
    tiled, device = layer.is_tiled, layer.weight.device
    twin.to(device)
    layer._parameters.update(twin._parameters)
    layer.decode_as(twin.decoding)
    layer.settle(device)
    if not tiled:
        layer.to_planes()


def requantize(layer: KbitWeight, weight, name: str, columns: torch.Tensor | None = None) -> None:
    """Quantizes another weight (``reference.matrices``) into the layer, in the form in which its own is: one that is
    offloaded has planes.

    With the column scales that its own has, what is hardly changed is not rounded anew.
    """
    tiled = layer.is_tiled
    if columns is not None:  # zeros are those of a layer that never had a weight
        columns = columns.data.to(weight.device) if columns.all() else None
    layer.load_dense(weight, name, columns)
    if not tiled:
        layer.to_planes()
