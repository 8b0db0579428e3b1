"""The quantizer that Transformers calls while it loads a model.

Two ways lead here. A 16-bit checkpoint is quantized on the fly: every layer to be quantized waits for a packed
weight, and each weight is packed when it arrives, so that only a few 16-bit weights are alive at a time. A quantized
checkpoint is loaded as it is: what it holds packed decides which layers are.

The order in ``from_pretrained``: the model is built on the meta device, ``_process_model_before_weight_loading`` and,
with the conversions that map names, ``update_weight_conversions`` are called, which changes layers, the weights are
loaded, new heads initialised, hooks for offloading attached, and ``_process_model_after_weight_loading`` finishes.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightTransform
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from hf_kbit.files import checkpoint
from hf_kbit.format.decoding import COLUMNS, Decoding
from hf_kbit.format.errors import refuse
from hf_kbit.format.kinds import NAMES
from hf_kbit.format.model import Exl3
from hf_kbit.integrations.transformers import exl3, fit, further, ignored, inputs, mxfp4, parallel, tying
from hf_kbit.integrations.transformers.conversions import (
    AWAY,
    Away,
    KbitQuantize,
    assembly,
    parameter_of,
    placeholder,
    unused_conversions,
    without_packing,
    would_revert,
)
from hf_kbit.integrations.transformers.names import Names, stored_names
from hf_kbit.integrations.transformers.offload import keep_tables, read_from_disk
from hf_kbit.integrations.transformers.report import logger, report
from hf_kbit.nn.dense import dequantize, empty_dense, shown_dense
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.site import unpack
from hf_kbit.nn.weight import KbitWeight, is_sharded, local, packed_layers, said_of, whole
from hf_kbit.plan import allocation, selection
from hf_kbit.plan.config import KbitConfig
from hf_kbit.plan.plan import Outcome, Plan
from hf_kbit.weight.tensor import HOW, WEIGHT, KbitTensor


@register_quantizer("kbit")
class KbitHfQuantizer(HfQuantizer):
    """See the header of this file, and ``HfQuantizer`` for when each method is called."""

    requires_calibration = False
    on_loading: Callable[[], ModuleType]  # calibration.on_loading, a room above this one, which the package puts here

    def __init__(self, quantization_config: KbitConfig, **kwargs):
        # A copy: the quantizer writes into it what files say of one model, and users reuse their config.
        super().__init__(copy.deepcopy(quantization_config), **kwargs)
        # Without that, somebody has put it into the config of a 16-bit model.
        self.pre_quantized = self.pre_quantized and quantization_config.stored is not None
        if not self.pre_quantized:
            self.quantization_config.stored = None
        self.waiting: tuple | None = None  # a model and its checkpoint, until it is known how names are mapped
        self.problems: list[str] = []
        self.made_together: list[list[str]] = []  # parts of names of tensors that one conversion makes
        self.mxfp4: list[str] = []  # projections that the checkpoint holds so
        self.from_mxfp4: dict[str, int | None] = {}  # those packed: how many blocks were quantized anew; None: all
        self.stored: list[str] = []  # layers that the checkpoint has packed, as conversions find their names
        self.files: dict[str, str] = {}  # of the tensors of a quantized checkpoint
        self.names: dict[str, str] = {}  # of its packed layers there, by those in the model
        self.ignored = ignored.Ignored()  # tensors there that the model's class leaves out
        self.further: dict[str, Decoding] = {}  # layers among these that are packed
        self.exl3: exl3.Folder | None = None  # the checkpoint, if it is one
        self.device_map: object = None
        self.text: object = None  # what the model is to read, if it is calibrated
        self.columns: dict[str, torch.Tensor] = {}  # column scales of a model that processes are about to share
        self.shapes: dict[str, torch.Size] = {}  # of parameters that are not packed, as the model has them
        self.plan: Plan | None = None  # of the model, while it is loaded
        self.outcome = Outcome()
        self.away: Away | None = None  # where packed weights are kept, of a model that is loaded to be saved

    def validate_environment(self, *args, device_map=None, **kwargs):
        refuse_zero3()
        self.device_map = device_map
        if not self.pre_quantized and isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "device_map: found layers on disk, expected none while quantizing: a layer on disk is read from the "
                "16-bit checkpoint each time. Quantize and save first: a quantized checkpoint can be offloaded"
            )

    @property
    def calibrates(self) -> bool:
        """Whether weights come as they are, and are quantized with data once all are there."""
        return not self.pre_quantized and self.quantization_config.calibrate is not None

    def update_device_map(self, device_map):
        return {"": "cpu"} if self.calibrates else super().update_device_map(device_map)

    @property
    def calibrated(self) -> str:
        """By which method, and on what, in words, if the model was calibrated in this process."""
        return self.outcome.calibrated

    @property
    def tuned(self) -> str:
        """What tuning has gained, in words, if the model was tuned in this process."""
        return self.outcome.tuned

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        refuse_zero3()  # a Trainer may be told of it after the model was loaded
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    # --- before loading ---

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        self.waiting = model, checkpoint_files

    def update_weight_conversions(self, weight_conversions, model=None):
        """Gets all that maps names, the user's ``key_mapping`` too, and so is where a model is prepared."""
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            self._prepare(*waiting, weight_conversions)
        self.made_together = [c.target_patterns for c in weight_conversions if len(c.target_patterns) > 1]
        ours = assembly(self, self.stored) if self.exl3 is None else self.exl3.conversions(self)
        return [*ours, *weight_conversions, *mxfp4.conversions(self.mxfp4, self)]

    def _prepare(self, model, checkpoint_files, conversions: list[WeightTransform]) -> None:
        if not self.pre_quantized and (stored := fit.config_beside(checkpoint_files)) is not None:
            # A part of a quantized model, whose own config does not say so.
            self.quantization_config, self.pre_quantized = stored, True
            model.config.quantization_config = stored
        if self.pre_quantized:
            self._prepare_quantized(model, checkpoint_files, conversions)
        else:
            tensors, names = fit.read_unpacked(checkpoint_files or ()), Names(model, conversions)
            self.mxfp4 = mxfp4.projections(tensors)
            if self.calibrates:
                how = self.device_map, self.mxfp4
                self.text = self.on_loading().prepare(model, self.quantization_config, *how)
                return
            self.ignored = ignored.find(model, names, tensors)
            if AWAY.get() is not None:
                self.away = Away(model, self.quantization_config, checkpoint_files or ())
            self._prepare_on_the_fly(model, [*tensors, *self.mxfp4], names)
        if getattr(model.config, "distributed_config", None) is None:  # else there will be shards
            self.shapes = {name: parameter.shape for name, parameter in _unpacked(model)}
        model.initialize_weights = partial(self._initialize_weights, model)
        model.get_parameter = partial(parameter_of, model)

    def _prepare_on_the_fly(self, model, tensors: list[str], names: Names) -> None:
        config, packable = self.quantization_config, selection.Packable(model)
        chosen = packable.choose(config)
        shared = parallel.is_shared(model.config)
        fused = {name: packable.sites[name].kind is KbitProjection for name in chosen}
        weights = [name if fused[name] else f"{name}.weight" for name in chosen if fused[name] or shared]
        targets = {name: names.targets(name)[0] for name in tensors} if weights else {}
        fit.check_present(model, weights, targets)
        if shared:
            known = {name: [target for target in own if target in names] for name, own in targets.items()}
            fit.check_apart(weights, known, self.mxfp4)
        if chosen and config.bits % 1:  # a mean
            of_mean = {name: packable.sites[name] for name, bits in chosen.items() if bits % 1}
            widths = allocation.by_rule(model, of_mean, config.bits, config)
            self.quantization_config = config = allocation.config_of(config, widths)
            chosen |= widths
        if not chosen:
            logger.warning("hf_kbit: found no linear layer to quantize in %s", type(model).__name__)
        self.plan = packable.plan(config, chosen)
        self.outcome = self.plan.outcome
        for layer in self.plan.make_room().values():
            layer.awaits_dense = True

    def _prepare_quantized(self, model, files: list[str] | None, conversions: list[WeightTransform]) -> None:
        """Makes room for what is packed, and checks that it fits. What else does not fit a model of another class or
        config than the one that was saved is not for us to refuse, but for Transformers, as with any checkpoint."""
        names, config = Names(model, conversions), self.quantization_config
        is_exl3, saved = isinstance(config.stored, Exl3), files is not None and fit.is_saved(model, files)
        if is_exl3:
            if files is None:
                raise ValueError(
                    "quantization_config: found 'exl3' and no files, expected a folder that exllamav3 wrote"
                )
            tensors = checkpoint.read_headers(files)
            exl3.untie(model, tensors)
        packable = selection.Packable(model)
        if is_exl3:
            self.exl3 = exl3.read(model, config, files, tensors, names)
            tensors, packed = self.exl3.tensors, self.exl3.packed
            self.quantization_config = config = self.exl3.config
        elif files is None:
            # from_pretrained(None, state_dict=...): no file says what is packed, so the config must.
            packed = {name: name for name in packable.choose(config)}
            packed |= {names.module(f"{name}.weight"): name for name in config.stored.layers}
        else:
            tensors = checkpoint.read_headers(files)
            packed = fit.packed_in(names, tensors)
            if not packed:
                raise ValueError(
                    f"{files[0]}: found no packed tensor, expected those that quantization_config in config.json is "
                    "of; to load a 16-bit checkpoint, take quantization_config out of config.json"
                )
        if files is not None:
            self.ignored = ignored.find(model, names, tensors, packed)
            self.further = further.read_decodings(model, self.ignored, tensors, config.stored)
            packed = {name: own for name, own in packed.items() if name not in self.further}
        self.plan = packable.stored(config, packed)
        layers = self.plan.make_room()
        self.stored, self.names = [names.renamed(name) for name in packed.values()], packed
        tied = [each for name in packed for each in self.plan.group(name) if each not in packed]
        if files is None:  # names may be both of what is tied, and those of the whole model, or of this part of it
            self.stored += tied
            base = f"{model.base_model_prefix}."
            self.stored += [name.removeprefix(base) for name in self.stored] + [base + name for name in self.stored]
            return
        self.files = {name: tensor.file for name, tensor in tensors.items()}
        fit.check_tensors(model, layers, names, tensors, packed, whole=saved)
        if parallel.is_shared(model.config):
            self.columns = checkpoint.read_columns(self.files, packed)
            model._keys_to_ignore_on_load_unexpected |= {rf"\.({COLUMNS}|{HOW})$"}
        checkpoint.check_save(files, config.stored, [*packed.values(), *self.ignored.packed.values(), *tied])

    # --- while loading ---

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        """Of the tensors that a conversion makes Transformers asks for the first, and means all."""
        names = [param_name]
        for first, *others in self.made_together:
            if first in param_name:
                names += [param_name.replace(first, other, 1) for other in others]
        on_the_fly = not self.pre_quantized and not self.calibrates
        return on_the_fly and any(placeholder(model, name) is not None for name in names)

    def get_quantize_ops(self) -> ConversionOps:
        return KbitQuantize(self)

    def param_element_size(self, model, param_name: str, param: torch.Tensor) -> float:
        stand_in = hasattr(param, "stands_for")  # of all weights for those of this process
        own = local(param.stands_for if stand_in else param)
        return own.nbytes_packed / param.numel() if stand_in else own.element_size()

    def _initialize_weights(self, model) -> None:
        """``initialize_weights`` of a model whose weights have come: what the checkpoint lacks is filled in by the
        model's own code, which may be anybody's and write where it likes. So it sees dense layers."""
        del model.initialize_weights, model.get_parameter
        shared = getattr(model.config, "distributed_config", None) is not None
        if shared:  # FSDP2 knows layers by their places; code of models that can be shared heeds these marks
            for layer in packed_layers(model).values():
                layer.weight._is_hf_initialized = True
        elif not self.pre_quantized:
            self._unpack_new()
        with nullcontext() if shared else shown_dense(model):
            model.initialize_weights()

    def _unpack_new(self) -> None:
        """Makes dense again what the checkpoint had no weight for: a new head, to be trained, or a table."""
        for name in self.plan.decodings:
            group = [site for each in self.plan.group(name) if (site := self.plan.sites[each]).is_packed]
            if not any(getattr(site.weight, "_is_hf_initialized", False) for site in group):
                for site in group:
                    if site.kind is not KbitProjection:
                        unpack(site, empty_dense(site, site.weight.device))

    # --- after loading ---

    def adopt(self, plan: Plan) -> None:
        """Makes a model that was quantized in memory what loading would have made it."""
        self.outcome, model = plan.outcome, plan.model
        self.ignored = ignored.find_for(model)
        # As weights are marked that Transformers has loaded.
        for name in plan.decodings.keys() - plan.outcome.lost.keys():
            plan.sites[name].weight._is_hf_initialized = True
        model.hf_quantizer, model.is_quantized = self, True
        model.quantization_method = self.quantization_config.quant_method
        self.postprocess_model(model)

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self.calibrates:
            del model.hf_quantizer, model.config.quantization_config, model.quantization_method
            model.is_quantized = False
            self.on_loading().run(model, self.quantization_config, self.text, self.device_map)
            return
        what = "the files were not saved with the config" if self.pre_quantized else "cannot quantize the checkpoint"
        refuse(self.problems, what)
        layers = packed_layers(model)
        refuse([*self._misshapen(model), *self._missing(layers)], "the checkpoint does not fit the model")
        tying.mark(model)
        read_from_disk(model, self._read if self.exl3 is None else self.exl3.read)
        keep_tables(model, self.quantization_config.embedding_device == "cpu")
        for layer in layers.values():
            layer.awaits_dense = False
            layer._is_hf_initialized = True  # init_weights() of the model passes it by
        self.keep_packed_names(model, layers)
        inputs.set_wished(model, layers, self.quantization_config, self.pre_quantized)
        self._record(model, layers)
        report(self, model, layers)
        self.plan = None  # or model and quantizer would keep each other alive

    def _read(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of a packed layer from the files."""
        own = [own for own in NAMES if f"{self.names[name]}.{own}" in self.files]
        return dict(zip(own, checkpoint.read_some(self.files, [f"{self.names[name]}.{o}" for o in own]), strict=True))

    def _misshapen(self, model) -> Iterator[str]:
        """What Transformers 5.17 puts into a quantized model all the same."""
        for name, parameter in _unpacked(model):
            expected = self.shapes.get(name, parameter.shape)
            if parameter.shape != expected:
                found = f"{name}: found shape {list(parameter.shape)}, expected {list(expected)}"
                yield f"{found}; this Transformers takes no notice of ignore_mismatched_sizes"

    def _missing(self, layers: Mapping[str, KbitWeight]) -> Iterator[str]:
        for name, layer in layers.items():
            if not getattr(layer.weight, "_is_hf_initialized", False) and not hasattr(layer, "_hf_hook"):
                yield f"{name}.weight: not in the checkpoint"
            elif not self.pre_quantized and not isinstance(local(layer.weight), KbitTensor):
                yield (
                    f"{name}.weight: found it in {layer.weight.dtype} after loading, expected it packed: this "
                    "Transformers reads weights in a way that hf_kbit does not know"
                )

    def keep_packed_names(self, model, layers) -> None:
        """Takes out the conversions that saving would revert on packed tensors: to split, merge or rename these."""
        known = without_packing(getattr(model, "_weight_conversions", None) or [])
        self._all_weight_conversions = known
        model._weight_conversions = [c for c in known if not would_revert(c, layers)]

    def _record(self, model, layers) -> None:
        names = stored_names(model, layers, self.further)
        tied = tying.tied(model)  # which are stored by another name
        stored = {names[name]: layer for name, layer in layers.items() if name not in tied}
        decodings, tables, version = said_of(stored)
        decodings |= {names[name]: decoding for name, decoding in self.further.items()}
        self.quantization_config.record(decodings, tables, version)
        left = {allocation.exactly(name): None for name in self.outcome.lost}
        self.quantization_config.module_bits = left | {
            pattern: bits for pattern, bits in self.quantization_config.module_bits.items() if pattern not in left
        }
        inputs.save_wish(model, self.quantization_config)

    # --- saving, undoing ---

    def get_state_dict_and_metadata(self, model):
        layers = packed_layers(model)
        if getattr(model, "_hf_peft_config_loaded", False):  # only adapters are saved
            return super().get_state_dict_and_metadata(model)
        tied = {f"{name}.weight" for name in tying.tied(model)}
        values = model.state_dict(keep_vars=True)  # packed weights as one value each
        state = {name: tensor.detach() for name, tensor in values.items() if name not in tied}
        flat = flattened(model, state)
        if flat:  # else another process writes
            others = ignored.read(self.ignored)
            if not self.pre_quantized:
                others, self.further = further.pack(model, self.ignored, others, self.quantization_config)
            flat |= others
        self._record(model, layers)  # merging adapters may have changed exponents
        model.config.quantization_config = self.quantization_config  # the model may have been given another config
        return flat, checkpoint.unsealed(self.quantization_config.stored)

    def _dequantize(self, model, dtype=None):
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        refuse_scattered(model)
        previous = model.dtype
        dequantize(model, dtype)
        inputs.remove_wish(model)
        if dtype != previous:
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.dtype == previous:  # what is kept in float32 stays there
                    tensor.data = tensor.data.to(dtype)
            model.config.dtype = dtype
        model._weight_conversions = [*self._all_weight_conversions, *unused_conversions(model)]
        return model


def refuse_scattered(model) -> None:
    """Raises if a packed weight is not whole in this process's memory, as dequantizing wants it."""
    for name, layer in packed_layers(model).items():
        if layer.weight.is_meta or is_sharded(layer.weight):
            where = "offloaded" if layer.weight.is_meta else "sharded over several processes"
            raise ValueError(
                f"{name}.weight: found it {where}, expected all of it in this one to dequantize: save the model, "
                "and load it in one process, in memory"
            )


def refuse_zero3() -> None:
    """Raises if DeepSpeed is about to take models apart: its ZeRO-3 leaves layers without their weights' shapes."""
    if is_deepspeed_zero3_enabled():
        raise ValueError(
            "DeepSpeed: found ZeRO-3, expected ZeRO-1 or ZeRO-2 for a quantized model: use FSDP2 instead to shard it"
        )


def flattened(model, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict with the tensors that files hold in the place of packed weights, in CPU memory. Of a model that
    processes share all of them have to call it: the first gets all tensors, the others none."""
    sharded = any(map(is_sharded, state.values()))
    flat, writes = {}, not sharded or dist.get_rank() == 0
    packed = {name for name, tensor in state.items() if isinstance(local(tensor), KbitTensor)}
    for name, tensor in state.items():
        tensor = whole(tensor)
        if not writes:
            continue
        if isinstance(tensor, KbitTensor):
            weight = load_offloaded_parameter(model, name) if tensor.is_meta else tensor
            prefix = name.removesuffix(WEIGHT)
            flat |= {prefix + own: part for own, part in weight.file_tensors("cpu").items()}
        elif name in packed:
            raise ValueError(f"{name}: found parts of a packed weight that cannot be put together, expected all of it")
        else:
            flat[name] = tensor.cpu() if sharded else tensor
    return flat


def _unpacked(model) -> Iterator[tuple[str, nn.Parameter]]:
    """Of all but quantized layers."""
    for module_name, module in model.named_modules():
        if not isinstance(module, KbitWeight):
            yield from module.named_parameters(module_name, recurse=False)
