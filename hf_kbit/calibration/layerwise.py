"""``calibrate``: quantizes a model one layer at a time, with solvers that know what goes through its layers."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

import hf_kbit
from hf_kbit.calibration import capture, experts, feedback, inputs, learned, tuning, weighted
from hf_kbit.calibration.data import SEQUENCES, token_ids, tokenizer_of
from hf_kbit.calibration.resume import Finished, digest
from hf_kbit.calibration.rounding import round_linear, round_projection
from hf_kbit.calibration.writing import write
from hf_kbit.config import KbitConfig, config_or
from hf_kbit.integrations.transformers import selection
from hf_kbit.integrations.transformers.fit import saved_class
from hf_kbit.integrations.transformers.in_place import keep_adapters, leave_lost, quantize_layers, tie
from hf_kbit.integrations.transformers.plain import is_linear
from hf_kbit.integrations.transformers.quantizer import KbitHfQuantizer
from hf_kbit.mixing import stored_weights, units
from hf_kbit.nn.experts import is_projection

logger = logging.get_logger("transformers.hf_kbit")  # as integrations/transformers/report.py
# A solver is a module with ``solve(weight, moments, codebook) -> planes, absmax`` and ``DIAGONAL``: whether moments
# are the diagonal of the sum of x @ x.T, or all of it.
METHODS: dict[str, ModuleType] = {"feedback": feedback, "learned": learned, "weighted": weighted}


@torch.no_grad()
def calibrate(
    model: PreTrainedModel | str | Path,
    data: torch.Tensor | str | Path | Iterable[str] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    sequences: int | None = None,
    length: int | None = None,
    method: str = "feedback",
    tune: int | bool = 0,
    tune_whole: bool = True,
    batch: int = 4,
    device: torch.device | str | None = None,
    resume: str | Path | None = None,
    progress: bool = False,
    config: KbitConfig | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **arguments: Any,
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
        data: what the model is for, some 64,000 tokens of it. A text; a ``pathlib.Path``, of a file in UTF-8; rows of
            text, such as ``load_dataset(...)["text"]``, all of which are read, with an empty line between two; or
            int64 ``[sequences, tokens]``, none of them padding. None: text that the model writes by itself, the same
            each time; one that cannot, such as an encoder, reads a small set of texts of many kinds.
        tokenizer: for all but token ids. Default: that of the model's folder or name.
        sequences: so many of a text at most, evenly spread over it. Token ids are taken as they are. Default: 128, or
            32 for what the model writes on a CPU.
        length: tokens of each, or what the model or the tokenizer has positions for. Best as many as the model will
            read at once: some ten if it reads sentences. Default: 2048 of a text, 640 of what the model writes, 512
            on a CPU.
        method: ``"feedback"``: the weights not yet rounded make up for the errors of those that are; needs K * K
            float32, a few times over, for a layer of K in_features. ``"weighted"``: only scales are chosen, by errors
            weighted by the inputs' squares; quicker. ``"learned"``: scales by gradient descent on the error of the
            layer's outputs.
        tune: then train what is stored, for so many steps (docs/calibration.md): scales and codes of each layer of the
            model, a fifth of the steps, on its output; then scales, norms and biases of the whole model on how it
            predicted the next token in 16 bits. The bytes stay as many; what is gained on sequences that were held out
            is in the log and the model card. True: 1000 steps, or 200 on a CPU. Without data the model then writes
            4096 sequences, or 256 on a CPU; of these, or of the data's, 128 at most are for the layers. Causal
            language models only.
        tune_whole: whether ``tune`` trains the whole model too, for which there must be memory for it some six times
            in 16 bits, and for its activations. False: its layers alone.
        batch: sequences that go through a layer at a time.
        device: where a layer is while it is calibrated: a GPU then has room for one of them, with its statistics, a
            few times over. Default: where the model is; if that is a CPU, the GPU, where there is one.
        resume: a folder, which gets a file for each finished layer; the same call with it goes on where one was
            killed, and gives the same bytes. Remove it once the model is saved.
        progress: shows a bar on stderr. Off unless asked for, as everywhere in Python; the command shows one.
        config: which layers, widths and levels, as ``choose_widths`` returns; ``scale`` is always searched.
        revision: branch, tag or commit of a model on the Hub.
        trust_remote_code: whether Python code that comes with the model may run.
        arguments: of ``KbitConfig``, such as ``bits=3``, instead of ``config``.

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
    quantizer = KbitHfQuantizer(config_or(config, arguments), pre_quantized=False)
    check(method, batch, quantizer.quantization_config)
    if quantizer.quantization_config.bits % 1:
        raise ValueError(
            f"bits: found {quantizer.quantization_config.bits}, expected 2, 3, 4 or 5, or the config that "
            "hf_kbit.choose_widths returns for such a mean"
        )
    source = {"revision": revision, "trust_remote_code": trust_remote_code}
    if not isinstance(model, nn.Module):
        model = load(model, **source)
    packable, widths = _check_model(model, quantizer.quantization_config)
    tuning.check(model, tune)
    device = capture.resolve(device, model)
    if tune and tune_whole:
        check_room(model, widths, data, length, device)
    widths = leave_lost(model, widths, quantizer, device)
    if data is None:
        data = written(model, sequences, length, tune, device, progress)
    if tokenizer is None and not isinstance(data, torch.Tensor):
        tokenizer = tokenizer_of(model.name_or_path, **source)
    ids = text = token_ids(data, tokenizer, model, sequences, length)
    steps = tuning.steps_on(device, tune)
    if steps:
        tuning.check(model, tune, len(text))
        ids = text[:: max(len(text) // SEQUENCES, 1)][:SEQUENCES]
    of_layer = max(steps // tuning.LAYER_STEPS, 1)
    whole = steps > 0 and tune_whole
    before = tuning.sharing_copy(model).eval() if whole else None
    tables, heads = packable.tables_in(widths), _heads(model, packable, widths)
    untied = {name: bits for name, bits in tables.items() if name not in heads.values()}
    quantize_layers(model, packable, untied, quantizer, device)  # which data does not go through, but comes from
    widths = {name: bits for name, bits in widths.items() if name not in tables}
    widths |= {head: tables[first] for head, first in heads.items()}
    projections = [name for name in widths if is_projection(model, name)]
    # Before a layer computes in another dtype: they stand for the weights as the model has them.
    empty = {
        name: quantizer.new_layer(model, name, bits).train(selection.holder(model, name).training)
        for name, bits in widths.items()
    }
    for head in heads:
        empty[head].balances = False  # as a table
    of_experts, without_data, errors, finished = 0, 0, [], None
    with capture.evaluating(model), experts.opened(model, projections):
        layers = units(model, list(widths))
        capture.check(model, layers, ids, device)
        solver = METHODS[method]
        if resume is not None:
            run = (hf_kbit.__version__, torch.__version__, device.type, method, batch, quantizer.quantization_config)
            run += (steps,) if steps else ()  # not tune_whole: what is finished are layers, for which it is the same
            finished = Finished(Path(resume), digest([("ids", text), *model.state_dict().items()], *run))

        # Beside the data as quantized layers pass it on, which comes last, the data as the dense ones would.
        drifting = not solver.DIAGONAL
        both = torch.cat([ids, ids]) if drifting else ids
        last = [slice(start, min(start + batch, len(both))) for start in range(len(both) - len(ids), len(both), batch)]
        first = [slice(rows.start - len(ids), rows.stop - len(ids)) if drifting else None for rows in last]
        with tqdm(total=len(widths), desc="calibrating", unit="layer", disable=not progress) as bar:

            def visit(unit: str, run: Callable[[slice], Any]):
                names = layers.pop(unit, ())  # none if it has been here, as layers that a model shares
                dense, new = (
                    {name: model.get_submodule(name) for name in names},
                    {name: empty.pop(name) for name in names},
                )
                if names and (finished is None or not finished.load(unit, new, device)):
                    # Of one that is a layer of the model by itself, such as a head, the outputs would be large.
                    alone = [inputs.Group(names, True)] if names == [unit] else None
                    quantize(dense, new, run, alone)
                    if steps and not alone:
                        errors.append(tuning.tune_layer(model, new, run, ids, drifting, of_layer, device))
                    if finished is not None:
                        finished.save(unit, new)
                selection.replace_modules(model, new)
                bar.update(len(names))
                return outputs(new, dense, run)

            def quantize(dense, new, run, alone) -> None:
                done = {}

                def quantized(rows):
                    with inputs.standing_in(dense, done):
                        run(rows)

                for group in alone or inputs.groups(dense, partial(run, last[0])):
                    # A table that made up for the drift of the head's inputs would be another one to look-ups.
                    made_up = drifting and group.names[0] not in heads
                    runs = [
                        (partial(quantized, rows), partial(run, rows_of_dense) if made_up else None)
                        for rows, rows_of_dense in zip(last, first, strict=True)
                    ]
                    like = dense[group.names[0]]
                    if isinstance(like, experts.DenseProjection):
                        round_experts(group, new, like, runs)
                    else:
                        moments = inputs.moments(like, group, runs, solver.DIAGONAL)
                        for name in group.names:
                            round_linear(name, new[name], dense[name], moments, solver)
                    done |= {name: new[name] for name in group.names}

            def round_experts(group, new, projection, runs) -> None:
                nonlocal of_experts, without_data
                (name,) = group.names
                around = model.get_submodule(name.rpartition(".")[0])
                shares = experts.shares(projection, around, group.once, runs, solver.DIAGONAL)
                without_data += round_projection(name, new[name], projection, shares, solver)
                of_experts += new[name].lead[0]

            def outputs(new, dense, run):
                if drifting:
                    selection.replace_modules(model, dense)
                    yield from ((rows, run(rows)) for rows in first)
                    selection.replace_modules(model, new)
                yield from ((rows, run(rows)) for rows in last)

            capture.stream(model, list(layers), both, device, visit)
    for head in heads:
        tie(model, packable, quantizer, head)
    if of_experts:  # in this run: others, before it was killed, had theirs
        logger.log(
            logging.WARNING if without_data else logging.INFO,
            "hf_kbit: %d of %d weights of experts are quantized without data: the text sends them too few tokens",
            without_data,
            of_experts,
        )
    tuned = []
    if errors:
        was, now = (sum(each) / len(errors) for each in zip(*errors, strict=True))
        tuned.append(f"squared error of layers' outputs {was:.3g} -> {now:.3g} of their squares")
    if whole:
        with capture.evaluating(model):
            trained = [name for name in widths if name not in heads]
            gain = tuning.tune_model(model, before, trained, text, steps, device, finished, progress)
        tuned.append(f"then {gain}")
    elif steps:
        tuned.append("layers alone")
    keep_adapters(model)
    quantizer.adopt(model, {**tables, **widths}, packable.unusual)
    if tuned:
        quantizer.tuned = ", ".join(tuned)
        logger.info("hf_kbit: tuned: %s", quantizer.tuned)
    return model


def written(model, sequences: int | None, length: int | None, tune: int | bool, device, progress: bool):
    """What ``calibrate`` takes without data: token ids that the model writes, or None where it cannot."""
    device = capture.resolve(device, model)
    if not tune:
        return write(model, sequences, length, device=device, progress=progress)
    amount = tuning.AMOUNTS.get(device.type, tuning.AMOUNTS[""])
    sequences, length = sequences or amount[0], length or amount[1]
    return write(model, sequences, length, varied=True, device=device, progress=progress)


def check_room(model, widths: Mapping[str, int], data, length: int | None, device: torch.device) -> None:
    """Refuses to tune the whole model where there is no room for that (``tuning.check_room``)."""
    length = data.shape[1] if isinstance(data, torch.Tensor) and data.dim() == 2 else length
    tuning.check_room(model, stored_weights(model, widths), length, device)


def check(method: str, batch: int, config: KbitConfig) -> None:
    """Refuses what ``calibrate`` cannot do, whatever the model and the data are.

    Raises:
        ValueError: an argument is out of range.
    """
    if method not in METHODS:
        raise ValueError(f"method: found {method!r}, expected one of {sorted(METHODS)}")
    if batch < 1:
        raise ValueError(f"batch: found {batch}, expected 1 or more")
    if config.scale != "search":
        raise ValueError(f"scale: found {config.scale!r}, expected 'search' or none")


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
    if not capture.reads_tokens(model):
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
