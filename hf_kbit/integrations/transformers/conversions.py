"""What a packed weight is to the conversions by which Transformers reads and writes checkpoints.

``KbitQuantize`` packs 16-bit weights while these come, ``KbitAssemble`` puts packed ones together. Saving reverts what
the other conversions of a model have done, which packed tensors must be spared.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightTransform
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from hf_kbit.files import checkpoint
from hf_kbit.files.finished import Finished, digest
from hf_kbit.format.decoding import ABSMAX, COLUMNS, WORDS, Decoding
from hf_kbit.format.kinds import NAMES
from hf_kbit.integrations.transformers import mxfp4, parallel, streams
from hf_kbit.integrations.transformers.offload import is_on_disk
from hf_kbit.nn.dense import empty_dense
from hf_kbit.nn.experts import KbitExperts, KbitProjection
from hf_kbit.nn.site import sites, unpack
from hf_kbit.nn.weight import KbitWeight, local
from hf_kbit.plan.config import KbitConfig
from hf_kbit.weight.tensor import HOW, WEIGHT, KbitTensor, Packed, as_parameter

# --- reading --------------------------------------------------------------------------------------

# Of models that are loaded to be saved: where packed weights are kept, and the device that packs them.
AWAY: ContextVar[tuple[Path, torch.device] | None] = ContextVar("where packed weights are kept", default=None)


@contextmanager
def packed_away(folder: Path, device: torch.device | str) -> Iterator[None]:
    """For models that are quantized while they load, on the CPU: each weight is packed on ``device``, saved in
    ``folder``, and mapped from there, so that memory need not hold it. Loading that was interrupted takes what is
    there. Remove the folder once the model is saved."""
    token = AWAY.set((folder, torch.device(device)))
    try:
        yield
    finally:
        AWAY.reset(token)


class Away:
    """Packed weights of one model in the folder of ``packed_away``."""

    def __init__(self, model: nn.Module, config: KbitConfig, files: Iterable[str]):
        folder, self.device = AWAY.get()
        stats = [(Path(file).name, (stat := Path(file).stat()).st_size, stat.st_mtime_ns) for file in files]
        versions = sys.modules["hf_kbit"].__version__, torch.__version__
        self.finished = Finished(folder, digest([], *versions, self.device.type, model.dtype, config, stats))

    def kept(self, name: str, layer: KbitWeight, pack: Callable[[], Packed]) -> Packed:
        """The weight of a layer, which is packed unless that was done before."""
        if (found := self.finished.load(name)) is None:
            packed = pack()
            if packed.lost:
                return packed
            try:
                self.finished.save(name, packed.tensors, [packed.decoding.to_dict(), packed.untransformed])
            except OSError as error:
                raise ValueError(f"{name}: found no way to keep it in {self.finished.folder} ({error})") from error
            found = self.finished.load(name)
        tensors, (entries, untransformed) = found
        return Packed(tensors, type(layer.decoding).from_dict(entries, layer.bits, name), untransformed)


class KbitQuantize(ConversionOps):
    """Packs a 16-bit weight as soon as it is read."""

    def __init__(self, hf_quantizer: HfQuantizer):
        self.hf_quantizer = hf_quantizer

    @torch.no_grad()
    def convert(self, input_dict, *args, model=None, missing_keys=None, **kwargs):
        streams.hold(input_dict)
        converted = {}
        for name, tensor in input_dict.items():
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            layer = placeholder(model, name)
            if layer is None:
                converted[name] = tensor
            else:
                missing_keys.discard(name)  # a projection has the name of a tensor there
                converted |= self._quantize(name.removesuffix(checkpoint.WEIGHT_SUFFIX), tensor, layer, model)
        return converted

    def _quantize(
        self, own_name: str, tensor: torch.Tensor | Packed, layer: KbitWeight, model
    ) -> dict[str, torch.Tensor]:
        name = own_name + checkpoint.WEIGHT_SUFFIX
        try:
            pack, away = partial(self._packed, tensor, layer, name), self.hf_quantizer.away
            packed = pack() if away is None else away.kept(own_name, layer, pack)
            if packed.lost:
                self.hf_quantizer.outcome.lost[own_name] = packed.lost
                return self._leave(own_name, tensor, layer, model)
        except (TypeError, ValueError) as error:
            # Transformers would swallow it here; it is raised when all weights have been seen.
            self.hf_quantizer.problems.append(str(error))
            value = KbitTensor.empty(layer.weight.shape, layer.decoding, layer.dense_dtype, tensor.device)
        else:
            value = layer.as_tensor(packed)
            if packed.untransformed:
                self.hf_quantizer.outcome.untransformed[own_name] = packed.untransformed
        return {name: parallel.own_part(value, layer.weight)}

    def _packed(self, tensor: torch.Tensor | Packed, layer: KbitWeight, name: str) -> Packed:
        if isinstance(tensor, Packed):
            return tensor
        weight, expected = tensor.mT if layer.transposed else tensor, layer.weight.shape
        if weight.shape != expected:
            raise ValueError(f"{name}: found shape {list(weight.shape)}, expected {list(expected)}")
        away = self.hf_quantizer.away
        return layer.quantize(weight if away is None else weight.to(away.device), name)

    def _leave(self, name: str, tensor, layer: KbitWeight, model) -> dict[str, torch.Tensor]:
        """The weight as it has come, for the 16-bit layer that is in its place again."""
        if parallel.is_shared(model.config):  # rules have sharded what was to be packed
            found = self.hf_quantizer.outcome.lost.pop(name)
            raise ValueError(
                f"{name}: found that {found}, expected a weight that can be packed where "
                "several processes load: leave the layer in 16 bits (modules_to_not_convert)"
            )
        plan = self.hf_quantizer.plan
        for site in map(plan.sites.__getitem__, plan.group(name)):
            if site.weight.is_meta:  # else it has come
                unpack(site, empty_dense(site, "meta"))
        self.hf_quantizer.from_mxfp4.pop(name, None)
        return {name if isinstance(layer, KbitProjection) else name + checkpoint.WEIGHT_SUFFIX: tensor}


class KbitAssemble(ConversionOps):
    """Makes one weight of its tensors in a quantized checkpoint. Where processes share a model Transformers
    has cut planes and scales; column scales are a vector, which it could not cut, and were read before."""

    def __init__(self, hf_quantizer: HfQuantizer, names: list[str]):
        self.hf_quantizer = hf_quantizer  # by which Transformers knows that it must not cast
        self.names = names  # of tensors, for each of which there is a pattern

    def __deepcopy__(self, memo):
        return self  # it is copied for each weight

    @torch.no_grad()
    def convert(
        self, input_dict, source_patterns, *args, full_layer_name=None, model=None, missing_keys=None, **kwargs
    ):
        streams.hold(input_dict)
        given = self.gathered([input_dict.get(pattern) for pattern in source_patterns])
        if isinstance(whole := given.get(WEIGHT), KbitTensor):  # of a state dict in memory
            return {full_layer_name: as_parameter(whole)}
        layer = model.get_submodule(full_layer_name.removesuffix(checkpoint.WEIGHT_SUFFIX))
        if is_on_disk(self.hf_quantizer.device_map, full_layer_name):
            missing_keys.discard(full_layer_name)
            return {}  # its layer reads it whenever it runs
        if self.hf_quantizer.columns:
            columns = self.hf_quantizer.columns.get(full_layer_name)
            given[COLUMNS] = parallel.own_columns(columns, layer.weight, given[WEIGHT].device)
        if HOW in given:  # of a state dict, perhaps one that another library has saved
            self._compare(given[HOW], layer.decoding, full_layer_name)
        if layer.decoding.read_whole:
            packed = Packed({name: given[name] for name in layer.decoding.layout(layer.weight.shape)}, layer.decoding)
            if wrong := layer.decoding.fault(packed.tensors):
                self.hf_quantizer.problems.append(f"{full_layer_name.removesuffix(WEIGHT)}{wrong}")
            return {full_layer_name: parallel.own_part(layer.as_tensor(packed), layer.weight)}
        own = local(layer.weight)
        tensors = {name: given[name] for name in layer.decoding.layout(own.whole_shape)}
        weight = KbitTensor.of(Packed(tensors, layer.decoding), own.whole_shape, layer.dense_dtype, layer.reads_tiles)
        return {full_layer_name: as_parameter(weight)}  # or Transformers makes a trainable one of it

    def gathered(self, tensors: list[list[torch.Tensor] | None]) -> dict[str, torch.Tensor]:
        """What has come, by the names that our files have; ``tensors``: those found for each of ``names``."""
        return {name: found[0] for name, found in zip(self.names, tensors, strict=True) if found}

    def _compare(self, how: torch.Tensor, expected: Decoding, name: str) -> None:
        """Takes down a decoding that is not the config's. Transformers would swallow an error here."""
        name = name.removesuffix(WEIGHT) + HOW
        try:
            if (found := type(expected).from_tensor(how.cpu(), expected.bits, name)) != expected:
                self.hf_quantizer.problems.append(f"{name}: found {found}, expected {expected}, as the config says")
        except ValueError as error:
            self.hf_quantizer.problems.append(str(error))


class Cut(ConversionOps):
    """Takes the padding off a bias."""

    def __init__(self, size: int):
        self.size = size

    def convert(self, input_dict, *args, full_layer_name=None, **kwargs):
        streams.hold(input_dict)
        ((value, *_),) = input_dict.values()
        return {full_layer_name: value[: self.size].clone()}


def placeholder(model, name: str) -> KbitWeight | None:
    """The empty layer that a 16-bit tensor of that name is to be packed into, if there is one."""
    try:
        module, own = get_module_from_name(model, name)
    except AttributeError:  # as with names in a conversion that are of other layers
        return None
    if isinstance(module, KbitExperts):
        module, own = module._modules.get(own), "weight"
    return module if isinstance(module, KbitWeight) and own == "weight" else None


def assembly(quantizer: HfQuantizer, layers: Iterable[str]) -> list[WeightConverter]:
    """What makes one weight of the tensors of each layer: by whole names, so that it meets nothing else."""
    names = "|".join(map(re.escape, layers))
    if not names:
        return []
    own = [*(name for name in NAMES if not (quantizer.columns and name == COLUMNS)), HOW]
    sources = [rf"^({names})\.{name}(?!_)" for name in own]
    return [WeightConverter(sources, r"\1.weight", [KbitAssemble(quantizer, own)])]


def parameter_of(model: nn.Module, name: str) -> nn.Parameter:
    """``get_parameter``, by which Transformers asks what is to be loaded; for an empty projection, a tensor like the
    one whose name the checkpoint knows it by."""
    parent, _, own = name.rpartition(".")
    projection = getattr(model.get_submodule(parent), own, None)
    if not isinstance(projection, KbitProjection):
        return type(model).get_parameter(model, name)
    tensor = nn.Parameter(torch.empty(projection.model_shape, dtype=projection.dense_dtype, device="meta"))
    tensor.stands_for = getattr(projection.weight, "stands_for", projection.weight)
    return tensor


# --- writing --------------------------------------------------------------------------------------


def without_packing(conversions: Iterable[WeightTransform]) -> list[WeightTransform]:
    """Those of the model: without ours, which are there for one checkpoint."""
    ours = KbitAssemble | Cut | mxfp4.CollectMxfp4
    return [c for c in conversions if not any(isinstance(each, ours) for each in getattr(c, "operations", ()))]


def would_revert(conversion: WeightTransform, layers: Mapping[str, KbitWeight]) -> bool:
    """Whether saving would convert a packed tensor, or give that of a projection the name of a linear layer's, or a
    weight another name than what belongs to it."""
    reverse = conversion.reverse_transform()
    for name, layer in layers.items():
        renamed, pattern = reverse.rename_source_key(f"{name}.weight")
        own = name.rpartition(".")[2]
        projection_lost = isinstance(layer, KbitProjection) and not renamed.endswith(f".{own}.weight")
        apart = reverse.rename_source_key(f"{name}.{ABSMAX}")[0] != renamed.removesuffix(WORDS) + ABSMAX
        if pattern is not None and (isinstance(conversion, WeightConverter) or projection_lost or apart):
            return True
    return False


def unused_conversions(model) -> list[WeightTransform]:
    """Those by which Transformers saves experts and which did not load these: they were packed then."""
    names = [name for name, site in sites(model).items() if site.kind is KbitProjection]
    return [
        conversion
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if not any(used.source_patterns == conversion.source_patterns for used in model._weight_conversions or ())
        and any(conversion.reverse_transform().rename_source_key(name)[1] is not None for name in names)
    ]
