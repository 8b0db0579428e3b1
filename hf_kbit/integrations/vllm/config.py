"""What vLLM asks of a quantization: which layers of a model are packed, and how each decodes."""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform

from hf_kbit.files import checkpoint
from hf_kbit.format.decoding import Decoding
from hf_kbit.format.errors import refuse
from hf_kbit.integrations.transformers import fit, tying
from hf_kbit.integrations.transformers.exl3 import EXPERT
from hf_kbit.integrations.transformers.further import Alike
from hf_kbit.integrations.transformers.inputs import wish_in
from hf_kbit.integrations.transformers.quantizer import KbitHfQuantizer
from hf_kbit.integrations.transformers.report import report_inputs
from hf_kbit.integrations.vllm.fused_moe import KbitExpertsMethod
from hf_kbit.integrations.vllm.linear import KbitLinearMethod
from hf_kbit.nn.experts import DOWN_PROJECTION, KbitProjection
from hf_kbit.nn.linear import KbitLinear
from hf_kbit.nn.site import site_of
from hf_kbit.ops import native
from hf_kbit.plan.config import EXL3, KbitConfig

# Values of --load-format with which nothing, or something else than the tensors of the files, is loaded.
NOT_OF_FILES = "dummy", "runai_streamer_sharded", "sharded_state", "tensorizer"
# Of what vLLM makes one layer where a model's class does not say it.
MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@register_quantization_config("kbit")
class KbitVllmConfig(QuantizationConfig):
    """The ``quantization_config`` of a quantized model, and what its files hold.

    Attributes:
        layers: ``{name: Decoding}`` of packed layers, by the name that vLLM gives each as soon as it is known.
        tables: ``{name: (Decoding, whether a head is tied to it)}`` of packed tables of embeddings.
        experts: ``{name: (name in the checkpoint, {own name of a projection: Decoding}, members)}`` of packed experts;
            members as of ``KbitExpertsMethod``.
        biases: ``{name in the checkpoint: its size in the model}`` of those that are padded.
        head: name in the checkpoint of a packed head that is not tied to a packed table; "" if there is none.
        further: name in the checkpoint of a packed layer that the model itself has not (``further.py``), if any.
        shared: names in the checkpoint of packed tables and heads, which vLLM gives to further layers too.
        inputs: what the model's config wishes for, or None where the device has no kernels of 8-bit inputs: 16-bit
            ones are faster there.
        prefix: what vLLM puts before the names of all layers: for a draft of speculative decoding there is one.

    Raises:
        ValueError: the model is not quantized; vLLM is not to quantize while it loads.
    """

    def __init__(self, config: KbitConfig | None = None):
        super().__init__()
        if config is None or config.stored is None:
            raise ValueError(
                "quantization: found 'kbit' for a model that is not quantized, expected a quantized one. Quantize it "
                "first: hf-kbit quantize MODEL FOLDER --bits 4"
            )
        self.config, self.prefix, self.inputs = config, "", None
        self.layers, self.tables, self.experts, self.biases, self.head, self.further = Contents({}, {}, {}, {}, "", "")
        self.shared: set[str] = set()

    def __repr__(self):
        return f"{type(self).__name__}({self.config!r})"

    def get_name(self) -> str:
        return "kbit"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict) -> "KbitVllmConfig":
        return cls(KbitConfig.from_dict(config))

    def maybe_update_config(self, model_name: str, hf_config=None, revision: str | None = None) -> None:
        """Reads the headers of the checkpoint, and checks all of it against the model that was saved: vLLM itself runs
        on what memory held where a tensor is missing."""
        if os.path.isdir(model_name):
            folder = Path(model_name)
        else:
            folder = Path(snapshot_download(model_name, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
        contents = read_decodings(folder, self.config)
        self.layers, self.tables, self.experts, self.biases, self.head, self.further = contents
        self.shared = {*self.tables, self.head}
        if self.head and getattr(hf_config, "tie_word_embeddings", False):  # or vLLM may leave its tensors out
            hf_config.tie_word_embeddings = hf_config.get_text_config().tie_word_embeddings = False
        if wish := wish_in(hf_config):
            self._take(wish, current_platform.device_type)

    def _take(self, wish: str, device_type: str) -> None:
        """Fulfils a wish where the device has kernels, and logs which layers keep 16-bit inputs, and why."""
        self.inputs = wish if native.has_int8(device_type) else None
        made = {name: [decoding] for name, decoding in self.layers.items()}
        made |= {name: decodings.values() for name, (_, decodings, _) in self.experts.items()}
        left = {}
        for name, decodings in made.items():
            if self.inputs is None:
                left[name] = f"no kernel on {device_type}"
            elif why := next((decoding.keeps_inputs for decoding in decodings if decoding.keeps_inputs), ""):
                left[name] = why
        report_inputs(len(made), left)

    def apply_vllm_mapper(self, hf_to_vllm_mapper) -> None:
        def mapped(names: dict) -> dict:  # without those that are not in vLLM's model
            weights = {name + checkpoint.WEIGHT_SUFFIX: value for name, value in names.items()}
            found = hf_to_vllm_mapper.apply_dict(weights)
            return {name.removesuffix(checkpoint.WEIGHT_SUFFIX): value for name, value in found.items()}

        self.layers, self.tables, self.experts = map(mapped, (self.layers, self.tables, self.experts))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        prefix, asked = prefix.removeprefix(self.prefix), get_current_vllm_config_or_none()
        if asked and (found := asked.load_config.load_format) in NOT_OF_FILES:
            raise ValueError(
                f"load_format: found {found!r}, which loads no tensors of the model's files, expected 'auto': packed "
                "weights are made of what the files hold"
            )
        if isinstance(layer, LinearBase):
            decodings = {name: self.layers.get(name) for name in self._sources(prefix)}
            if not any(decodings.values()):
                return UnquantizedLinearMethod()
            return KbitLinearMethod(decodings, self.inputs)
        if isinstance(layer, RoutedExperts) and prefix in self.experts:
            own = prefix.rpartition(".")[2]
            if asked and (lora := asked.lora_config) and own in (lora.target_modules or [own]):
                raise ValueError(
                    f"{prefix}: found adapters to be allowed on packed experts, which vLLM runs on its own kernels "
                    "alone, expected adapters on other layers: name these, as in --lora-target-modules q_proj o_proj"
                )
            return KbitExpertsMethod(layer.moe_config, *self.experts[prefix], self.inputs)
        return None  # of tables and heads, too: embedding.py gives them theirs

    def _sources(self, name: str) -> list[str]:
        """Names of the layers that vLLM has made one of, in order; of one that is in the checkpoint its own."""
        parent, _, own = name.rpartition(".")
        merged = {**MERGED, **self.packed_modules_mapping}.get(own, [])
        if name in self.layers or not merged:
            return [name]
        return [f"{parent}.{source}".removeprefix(".") for source in merged]


if EXL3 not in QUANTIZATION_METHODS:

    @register_quantization_config(EXL3)
    class KbitExl3Config(KbitVllmConfig):
        """The ``quantization_config`` of a folder of exllamav3."""

        def get_name(self) -> str:
            return EXL3


class Contents(NamedTuple):
    """What a checkpoint holds: attributes of ``KbitVllmConfig``, by names in the checkpoint."""

    layers: dict[str, Decoding]
    tables: dict[str, tuple[Decoding, bool]]
    experts: dict[str, tuple[str, dict[str, Decoding], dict[str, tuple[str, int]]]]
    biases: dict[str, int]
    head: str
    further: str


def read_decodings(folder: Path, config: KbitConfig) -> Contents:
    """What the files of a checkpoint hold, as their headers and the config say.

    Raises:
        ValueError: a file is damaged, or tensors do not fit the model of ``config.json``, or are not as vLLM loads
            them; the message names them.
    """
    files = checkpoint.model_files(folder)
    model_config = AutoConfig.from_pretrained(folder)
    if (saved := fit.saved_class(model_config.architectures)) is None:
        raise ValueError(f"architectures: found {model_config.architectures} in config.json, expected a model's class")
    with torch.device("meta"):
        model = saved(model_config)
    quantizer = KbitHfQuantizer(config, pre_quantized=True)
    quantizer.preprocess_model(model, checkpoint_files=files)
    get_model_conversion_mapping(model, hf_quantizer=quantizer)  # as Transformers does next: replaces layers
    packed, ties, exl3 = quantizer.names, tying.tied(model), quantizer.exl3
    problems = [
        f"{packed[head]}.weight: found it instead of {table}.weight, to which it is tied, and which alone vLLM loads"
        for head, table in ties.items()
        if head in packed and table not in packed
    ]
    problems += [
        f"{stored}.weight: found a packed Conv1D, expected a linear layer: vLLM turns its tensors around"
        for name, stored in packed.items()
        if isinstance(layer := model.get_submodule(name), KbitLinear) and layer.transposed
    ]
    refuse(problems, "vLLM cannot run the quantized checkpoint; serve it with Transformers")
    layers, tables, experts, biases, members, alike = {}, {}, {}, {}, {}, Alike(model)
    if exl3 is not None:
        sizes = {name: header.shape for name, header in exl3.tensors.items() if name.endswith(".bias")}
        biases = {name: size[0] for name, size in sizes.items() if size != exl3.headers[name].shape}
        members = exl3.experts
    for name, stored in (packed | quantizer.ignored.packed).items():
        site = site_of(model, name) or alike.to(name)[0]
        decoding = quantizer.further.get(name) or site.layer.decoding
        if site.kind is KbitProjection:
            parent, _, own = stored.rpartition(".")
            if exl3 is not None:
                parent = EXPERT.match(next(iter(exl3.stacks[name].values())))[1]
            experts.setdefault(parent, (parent, {}, members))[1][own] = decoding
        elif site.is_table:
            tables[stored] = decoding, name in ties.values()
        else:
            layers[stored] = decoding
    for name, (_, projections, _) in experts.items():  # in the order in which they run
        experts[name] = name, dict(sorted(projections.items(), key=lambda item: item[0] == DOWN_PROJECTION)), members
    output = model.get_output_embeddings()
    heads = [stored for name, stored in packed.items() if model.get_submodule(name) is output and name not in ties]
    further = next(iter(quantizer.ignored.packed.values()), "")
    return Contents(layers, tables, experts, biases, heads[0] if heads else "", further)
