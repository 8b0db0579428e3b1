"""``calibrate``: quantizes a model one layer at a time, with solvers that know what goes through its layers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

import hf_kbit
from hf_kbit.allocation import stored_weights, units
from hf_kbit.calibration import experts, feedback, moments, stream, tuning, weighted
from hf_kbit.calibration.data import SEQUENCES, Text
from hf_kbit.calibration.resume import Finished, digest
from hf_kbit.calibration.rounding import round_linear, round_projection
from hf_kbit.calibration.writing import write
from hf_kbit.config import KbitConfig, config_or
from hf_kbit.integrations.transformers import selection
from hf_kbit.integrations.transformers.fit import saved_class
from hf_kbit.integrations.transformers.in_place import keep_adapters, leave_lost, quantize_layers, tie
from hf_kbit.integrations.transformers.plain import is_linear
from hf_kbit.integrations.transformers.quantizer import KbitHfQuantizer
from hf_kbit.nn.experts import is_projection

logger = logging.get_logger("transformers.hf_kbit")  # as integrations/transformers/report.py
# A solver is a module with ``solve(weight, moments, codebook) -> planes, absmax`` and ``DIAGONAL``: whether moments
# are the diagonal of the sum of x @ x.T, or all of it.
METHODS: dict[str, ModuleType] = {"feedback": feedback, "weighted": weighted}


@dataclass(frozen=True)
class Solving:
    """How weights are chosen while a model is calibrated.

    Attributes:
        method: ``"feedback"``: the weights not yet rounded make up for the errors of those that are; needs K * K
            float32, a few times over, for a layer of K in_features. ``"weighted"``: only scales are chosen, by errors
            weighted by the inputs' squares; quicker.
        tune: then train what is stored, for so many steps (docs/calibration.md): scales and codes of each layer of the
            model, a fifth of the steps, on its output; then scales, norms and biases of the whole model on how it
            predicted the next token in 16 bits. The bytes stay as many; what is gained on sequences that were held out
            is in the log and the model card. True: 1000 steps, or 200 on a CPU. Of the data's sequences 128 at most
            are for the layers. Causal language models only.
        tune_whole: whether ``tune`` trains the whole model too, for which there must be memory for it some six times
            in 16 bits, and for its activations. False: its layers alone.
        batch: sequences that go through a layer at a time.
        resume: a folder, which gets a file for each finished layer; the same call with it goes on where one was
            killed, and gives the same bytes. Remove it once the model is saved.
    """

    method: str = "feedback"
    tune: int | bool = 0
    tune_whole: bool = True
    batch: int = 4
    resume: str | Path | None = None

    def check(self, config: KbitConfig) -> None:
        """Refuses what cannot be done, whatever the model and the data are.

        Raises:
            ValueError: a setting is out of range, or the config's scales are not searched.
        """
        if self.method not in METHODS:
            raise ValueError(f"method: found {self.method!r}, expected one of {sorted(METHODS)}")
        if self.batch < 1:
            raise ValueError(f"batch: found {self.batch}, expected 1 or more")
        if config.scale != "search":
            raise ValueError(f"scale: found {config.scale!r}, expected 'search' or none")


def calibrate(
    model: PreTrainedModel | str | Path,
    data: torch.Tensor | str | Path | Iterable[str] | None = None,
    *,
    config: KbitConfig | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **settings: Any,
) -> PreTrainedModel:
    """Quantizes a model in place, so that on text like ``data`` its layers compute nearly what they did.

    The layers of the model are quantized one after another, each for the inputs that the quantized ones before it
    give. The result is like that of ``from_pretrained`` with a ``KbitConfig``: it runs, trains, saves and loads the
    same way, and which layers are quantized is decided the same way. Decoders, encoders and encoder-decoders; the
    latter read the same tokens on both sides. The experts of a mixture are quantized each for the tokens that are sent
    to it; those that are sent fewer than an eighth of their in_features without data, and the log counts them. A table
    of embeddings that is tied to a head is quantized last, for what goes into the head; any other without data.

    Args:
        model: float32, float16 or bfloat16, on one device, and it is changed; or a folder or a name on the Hub, to
            load it from into CPU memory, or rather to map its safetensors files there. Needs memory for what is
            quantized and, a few times over, the activations between two layers.
        data: what the model is for (``calibration.data.Text``), or None for text that the model writes by itself.
        config: which layers, widths and levels, as ``choose_widths`` returns; ``scale`` is always searched.
        device: where a layer is while it is calibrated: a GPU then has room for one of them, with its statistics, a
            few times over. Default: where the model is; if that is a CPU, the GPU, where there is one.
        progress: shows a bar on stderr. Off unless asked for, as everywhere in Python; the command shows one.
        revision: branch, tag or commit of a model on the Hub.
        trust_remote_code: whether Python code that comes with the model may run.
        settings: how much of a text is read (``tokenizer``, ``sequences``, ``length``: ``calibration.data.Text``), how
            weights are chosen (``method``, ``tune``, ``tune_whole``, ``batch``, ``resume``:
            ``calibration.layerwise.Solving``), and arguments of ``KbitConfig``, such as ``bits=3``, instead of
            ``config``.

    Returns:
        ``model``.

    Raises:
        TypeError: ``data`` is neither token ids nor text nor rows of text, ``tune`` is no number, ``config`` is no
            ``KbitConfig`` or stands beside arguments of one, or an argument is unknown.
        ValueError: an argument is out of range, the model is quantized already, is spread over devices, cannot be
            tuned, or has layers that tokens do not go through, a weight is NaN or infinite, or ``resume`` is of
            another run: the model is as it was. Or the inputs of a layer are: then the model is unusable.
        MemoryError: there is no room to tune the whole model, and it is as it was.

    Source: layer by layer as GPTQ (arXiv:2210.17323); the solvers' files name their own.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **shape))
    >>> calibrate(model, torch.randint(64, (8, 32)), bits=3).model.layers[0].mlp.down_proj
    KbitLinear(in_features=64, out_features=32, bias=False, bits=3)
    """
    text, solving, arguments = sort(settings, Text, Solving)
    config, text = config_or(config, arguments), replace(text, data=data)
    solving.check(config)
    if config.bits % 1:
        raise ValueError(
            f"bits: found {config.bits}, expected 2, 3, 4 or 5, or the config that hf_kbit.choose_widths returns for "
            "such a mean"
        )
    source = {"revision": revision, "trust_remote_code": trust_remote_code}
    if not isinstance(model, nn.Module):
        model = load(model, **source)
    return Calibration(model, config, solving, device, progress).of(text, **source)


def sort(settings: dict[str, Any], *kinds: type) -> tuple[Any, ...]:
    """An instance of each of these dataclasses, with those of the settings that are its fields; and the settings that
    are none's.

    >>> sort({"batch": 2, "bits": 3}, Text, Solving)[1:]
    (Solving(method='feedback', tune=0, tune_whole=True, batch=2, resume=None), {'bits': 3})
    """
    left, found = dict(settings), []
    for kind in kinds:
        found.append(kind(**{each.name: left.pop(each.name) for each in fields(kind) if each.name in left}))
    return *found, left


class Calibration:
    """Quantizes a model in place with data: ``plan`` refuses and chooses, ``run`` goes through the layers, ``finish``
    makes a quantized model of it.

    Args:
        model: of Transformers, in 16 or 32 bits.
        config: what to quantize; no mean width.
        solving: how, checked with that config.
        device: where layers compute, as for ``calibrate``.
        progress: shows bars on stderr.
    """

    def __init__(self, model: PreTrainedModel, config: KbitConfig, solving: Solving, device=None, progress=False):
        self.model, self.solving, self.progress = model, solving, progress
        self.quantizer, self.solver = KbitHfQuantizer(config, pre_quantized=False), METHODS[solving.method]
        self.device = device
        self.errors, self.finished = [], None
        self.of_experts = self.without_data = 0

    @torch.no_grad()
    def of(self, text: Text, **source: Any) -> PreTrainedModel:
        """All of it, for the inputs that this text gives: the model; ``source`` is of the tokenizer."""
        self.plan(text, **source)
        self.run()
        return self.finish()

    def plan(self, text: Text, **source: Any) -> None:
        """Chooses the layers, and the ids to read. After an error the model is as it was."""
        model, solving = self.model, self.solving
        self.packable, widths = _check_model(model, self.quantizer.quantization_config)
        tuning.check(model, solving.tune)
        self.device = stream.resolve(self.device, model)
        if solving.tune and solving.tune_whole:
            tuning.check_room(model, stored_weights(model, widths), text.tokens, self.device)
        widths = leave_lost(model, widths, self.quantizer, self.device)
        if text.data is None:
            own = written(model, text.sequences, text.length, solving.tune, self.device, self.progress)
            text = replace(text, data=own)
        self.ids = self.text = text.ids(model, **source)
        self.steps = tuning.steps_on(self.device, solving.tune)
        if self.steps:
            tuning.check(model, solving.tune, len(self.text))
            self.ids = self.text[:: max(len(self.text) // SEQUENCES, 1)][:SEQUENCES]
        self.tables, self.heads = self.packable.tables_in(widths), _heads(model, self.packable, widths)
        self.widths = {name: bits for name, bits in widths.items() if name not in self.tables}
        self.widths |= {head: self.tables[first] for head, first in self.heads.items()}
        # Beside the data as quantized layers pass it on, which comes last, the data as the dense ones would.
        self.drifting = not self.solver.DIAGONAL
        self.both = torch.cat([self.ids, self.ids]) if self.drifting else self.ids
        count, end = len(self.ids), len(self.both)
        self.last = [slice(at, min(at + solving.batch, end)) for at in range(end - count, end, solving.batch)]
        self.first = [slice(rows.start - count, rows.stop - count) if self.drifting else None for rows in self.last]

    def run(self) -> None:
        """Quantizes tables without data, and then one layer of the model after another."""
        model, tables, heads = self.model, self.tables, self.heads
        self.dense = tuning.sharing_copy(model).eval() if self.steps and self.solving.tune_whole else None
        untied = {name: bits for name, bits in tables.items() if name not in heads.values()}
        quantize_layers(model, self.packable, untied, self.quantizer, self.device)  # data comes from them
        # Before a layer computes in another dtype: they stand for the weights as the model has them.
        self.empty = {name: self.quantizer.new_layer(model, name, bits) for name, bits in self.widths.items()}
        for head in heads:
            self.empty[head].balances = False  # as a table
        projections = [name for name in self.widths if is_projection(model, name)]
        bar = tqdm(total=len(self.widths), desc="calibrating", unit="layer", disable=not self.progress)
        with stream.evaluating(model), experts.opened(model, projections):
            self.layers = units(model, list(self.widths))
            stream.check(model, self.layers, self.ids, self.device)
            if self.solving.resume is not None:
                self.finished = Finished(Path(self.solving.resume), self._digest())
            with bar:
                visit = partial(self._visit, bar)
                stream.stream(model, list(self.layers), self.both, self.device, visit)

    def finish(self) -> PreTrainedModel:
        """Ties what is tied, tunes the whole model, and makes it one that is quantized: returns it."""
        model = self.model
        for head in self.heads:
            tie(model, self.packable, self.quantizer, head)
        if self.of_experts:  # in this run: others, before it was killed, had theirs
            logger.log(
                logging.WARNING if self.without_data else logging.INFO,
                "hf_kbit: %d of %d weights of experts are quantized without data: the text sends them too few tokens",
                self.without_data,
                self.of_experts,
            )
        tuned = []
        if self.errors:
            was, now = (sum(each) / len(self.errors) for each in zip(*self.errors, strict=True))
            tuned.append(f"squared error of layers' outputs {was:.3g} -> {now:.3g} of their squares")
        if self.dense is not None:
            trained = [name for name in self.widths if name not in self.heads]
            how = self.text, self.steps, self.device, self.finished, self.progress
            with stream.evaluating(model):
                tuned.append(f"then {tuning.tune_model(model, self.dense, trained, *how)}")
        elif self.steps:
            tuned.append("layers alone")
        keep_adapters(model)
        self.quantizer.adopt(model, {**self.tables, **self.widths}, self.packable.unusual)
        if tuned:
            self.quantizer.tuned = ", ".join(tuned)
            logger.info("hf_kbit: tuned: %s", self.quantizer.tuned)
        return model

    def _digest(self) -> str:
        """Of all that the result depends on."""
        config, solving = self.quantizer.quantization_config, self.solving
        run = (hf_kbit.__version__, torch.__version__, self.device.type, solving.method, solving.batch, config)
        run += (self.steps,) if self.steps else ()  # not tune_whole: layers are the same
        return digest([("ids", self.text), *self.model.state_dict().items()], *run)

    def _visit(self, bar: tqdm, unit: str, run: Callable[[slice], Any]) -> Iterator[tuple[slice, Any]]:
        """Quantizes one layer of the model; returns what it computes then, and before that what it did."""
        names = self.layers.pop(unit, ())  # none if it has been here, as layers that a model shares
        dense = {name: self.model.get_submodule(name) for name in names}
        new = {name: self.empty.pop(name) for name in names}
        if names and (self.finished is None or not self.finished.load(unit, new, self.device)):
            # Of one that is a layer of the model by itself, such as a head, the outputs would be large.
            alone = [moments.Group(names, True)] if names == [unit] else None
            self._solve(dense, new, run, alone)
            if self.steps and not alone:
                steps = max(self.steps // tuning.LAYER_STEPS, 1)
                how = self.ids, self.drifting, steps, self.device
                self.errors.append(tuning.tune_layer(self.model, new, run, *how))
            if self.finished is not None:
                self.finished.save(unit, new)
        selection.replace_modules(self.model, new)
        bar.update(len(names))
        return self._outputs(dense, new, run)

    def _outputs(self, dense: dict, new: dict, run: Callable[[slice], Any]) -> Iterator[tuple[slice, Any]]:
        if self.drifting:
            selection.replace_modules(self.model, dense)
            yield from ((rows, run(rows)) for rows in self.first)
            selection.replace_modules(self.model, new)
        yield from ((rows, run(rows)) for rows in self.last)

    def _solve(self, dense: dict, new: dict, run: Callable[[slice], Any], alone: list[moments.Group] | None) -> None:
        """Gives each of the ``new`` layers its weight, in the order in which they are called."""
        done = {}

        def quantized(rows):
            with moments.standing_in(dense, done):
                run(rows)

        for group in alone or moments.groups(dense, partial(run, self.last[0])):
            # A table that made up for the drift of the head's inputs would be another one to look-ups.
            made_up = self.drifting and group.names[0] not in self.heads
            runs = [
                (partial(quantized, rows), partial(run, rows_of_dense) if made_up else None)
                for rows, rows_of_dense in zip(self.last, self.first, strict=True)
            ]
            like = dense[group.names[0]]
            if isinstance(like, experts.DenseProjection):
                self._solve_experts(group, new, like, runs)
            else:
                found = moments.moments(like, group, runs, self.solver.DIAGONAL)
                for name in group.names:
                    round_linear(name, new[name], dense[name], found, self.solver)
            done |= {name: new[name] for name in group.names}

    def _solve_experts(self, group: moments.Group, new: dict, projection: experts.DenseProjection, runs: list) -> None:
        (name,) = group.names
        around = self.model.get_submodule(name.rpartition(".")[0])
        shares = experts.shares(projection, around, group.once, runs, self.solver.DIAGONAL)
        self.without_data += round_projection(name, new[name], projection, shares, self.solver)
        self.of_experts += new[name].lead[0]


def written(model, sequences: int | None, length: int | None, tune: int | bool, device, progress: bool):
    """What ``calibrate`` takes without data: token ids that the model writes, or None where it cannot."""
    device = stream.resolve(device, model)
    if not tune:
        return write(model, sequences, length, device=device, progress=progress)
    amount = tuning.AMOUNTS.get(device.type, tuning.AMOUNTS[""])
    sequences, length = sequences or amount[0], length or amount[1]
    return write(model, sequences, length, varied=True, device=device, progress=progress)


def load(
    name: str | Path,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    **arguments: Any,
) -> PreTrainedModel:
    """The model of a folder or of a name on the Hub, of the class that was saved, in ``dtype``: ``"auto"`` is the one
    that it has there; ``arguments`` are of ``from_pretrained``.

    Its weights are on the CPU, mapped from the files: memory takes what is read of them, until it is short.

    Raises:
        ValueError: Transformers has no model of the class that the config names.
    """
    source = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(name, **source)
    try:
        model_class = class_to_load(config)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return model_class.from_pretrained(name, dtype=dtype, **source, **arguments)


def class_to_load(config: PreTrainedConfig) -> type:
    """The class that a config says was saved, or the Auto class that finds it: for a class that came as code with the
    model the one that its ``auto_map`` names, for one that Transformers does not have that of causal language models.

    Raises:
        ValueError: ``architectures`` is no list of names, or names what is no model for such a config.
    """
    found, name = saved_class(config.architectures), (config.architectures or [""])[0]
    for auto_class, place in (getattr(config, "auto_map", None) or {}).items():
        if name and str(place).endswith(f".{name}"):
            return getattr(transformers, auto_class)
    if not name or not hasattr(transformers, name):
        return AutoModelForCausalLM
    if found is None or found.config_class is None:
        raise ValueError(f"architectures: found {name!r}, expected the name of a model class")
    if not isinstance(config, found.config_class):
        raise ValueError(f"architectures: found {name}, expected a model class for a {type(config).__name__}")
    return found


def _check_model(model, config: KbitConfig) -> tuple[selection.Packable, dict[str, int]]:
    """What can be quantized, and ``{module name: bits}`` of what is to be, of a model that can be calibrated."""
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("model: found it quantized already, expected one in 16 or 32 bits")
    if not stream.reads_tokens(model):
        raise ValueError(f"model: found {type(model).__name__}, expected a model that reads token ids (input_ids)")
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1 or devices == {"meta"}:
        raise ValueError(f"model: found it on {sorted(devices)}, expected one device")
    packable = selection.Packable(model)
    widths = packable.choose(config)
    if not widths:
        raise ValueError(f"model: found no linear layer to quantize in {type(model).__name__}")
    for name in widths:
        if not selection.dense_weight(model, name).isfinite().all():
            raise ValueError(f"{name}.weight: found NaN or infinite values, expected finite ones")
    return packable, widths


def _heads(model, packable: selection.Packable, widths: Mapping[str, int]) -> dict[str, str]:
    """``{name: name under which its weight is stored}`` of heads that are tied to tables: their rounding errors cost
    nearly all that those of the tables do, and their inputs are known (docs/quality.md)."""
    heads = {}
    for first in dict.fromkeys(packable.ties.values()):
        tied = (first, *(name for name, stored in packable.ties.items() if stored == first))
        called = [name for name in tied if is_linear(model.get_submodule(name))]
        if called and first in widths:
            heads[called[0]] = first
    return heads
