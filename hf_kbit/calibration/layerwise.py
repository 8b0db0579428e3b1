"""``calibrate``: quantizes a model one layer at a time, with solvers that know what goes through its layers."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging
from transformers.utils.logging import tqdm

from hf_kbit.calibration import moments, routed, sensitivity, stream, tuning
from hf_kbit.calibration.check import check
from hf_kbit.calibration.data import SEQUENCES, Text, batches_of, size_of
from hf_kbit.calibration.loading import load
from hf_kbit.calibration.rounding import round_linear, round_projection
from hf_kbit.calibration.solving import METHODS, Solving, sort
from hf_kbit.calibration.writing import TRELLIS_SEQUENCES
from hf_kbit.calibration.writing import chosen as chosen_text
from hf_kbit.files.finished import Finished, digest
from hf_kbit.format.trellis import TrellisDecoding
from hf_kbit.integrations.transformers.in_memory import finish
from hf_kbit.nn.classes import twin
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.site import Site, empty, is_linear, pack, unpacked
from hf_kbit.nn.weight import KbitWeight, packed_layers
from hf_kbit.plan import selection
from hf_kbit.plan.allocation import units
from hf_kbit.plan.config import TRELLIS, KbitConfig, config_or
from hf_kbit.plan.plan import Plan, leave_lost, quantize_layers
from hf_kbit.plan.selection import check_any
from hf_kbit.weight.tensor import Packed

logger = logging.get_logger("transformers.hf_kbit")  # as integrations/transformers/report.py


def calibrate(
    model: PreTrainedModel | str | Path,
    data: torch.Tensor | Mapping[str, Any] | str | Path | Iterable[str] | None = None,
    *,
    config: KbitConfig | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **settings: Any,
) -> PreTrainedModel:
    """Quantizes a model in place, so that on text like ``data`` its layers compute nearly what they did. Each layer is
    quantized for the inputs that the quantized ones before it give.

    What is quantized, and what becomes of the model, is as with ``from_pretrained`` and a ``KbitConfig``. Decoders,
    encoders and encoder-decoders; the latter read the same tokens on both sides. An expert of a mixture that is sent
    fewer tokens than an eighth of its in_features is quantized without data, and the log counts them. So is a table of
    embeddings; one that is tied to a head is quantized last, for what goes into the head.

    Args:
        model: float32, float16 or bfloat16, on one device, and it is changed; or a folder or a name on the Hub, whose
            files are mapped into CPU memory. Needs memory for what is quantized and, a few times over, the activations
            between two layers.
        data: what the model is for (``calibration.data.Text``), or None for text that the model writes, or, for
            the method ``"weighted"``, a little of a built-in one.
        config: which layers, widths and levels, as ``choose_widths`` returns; ``scale`` is always searched.
        device: where a layer is while it is calibrated: a GPU then has room for one of them, with its statistics, a
            few times over; and, if its memory is large enough, for the whole model, while it weighs tokens or writes a
            text. Default: where the model is; if that is a CPU, the GPU, where there is one.
        progress: shows a bar on stderr, unless Transformers' bars are disabled.
        revision: branch, tag or commit of a model on the Hub.
        trust_remote_code: whether Python code that comes with the model may run.
        settings: how much of a text is read (``tokenizer``, ``sequences``, ``length``: ``calibration.data.Text``), how
            weights are chosen (``method``, ``tune``, ``tune_whole``, ``batch``, ``resume``:
            ``calibration.solving.Solving``), and arguments of ``KbitConfig``, such as ``bits=3``, instead of
            ``config``.

    Returns:
        ``model``.

    Raises:
        TypeError: an argument, or the dtype of a weight, is of another type, ``config`` stands beside arguments of
            one, or an argument is unknown.
        ValueError: an argument is out of range, the model is quantized already, is spread over devices, cannot be
            tuned, has layers that tokens do not go through, that are given NaN or infinity, or that keep what others
            need (``check.check``), a weight is NaN or infinite, or ``resume`` is of another run: the model is as it
            was. Where a run stops later, the log says what is packed by then: such a model cannot be used.
        MemoryError: there is no room to weigh tokens or to tune the whole model, and it is as it was.

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
    packable, chosen = choose(model, config)
    solving.check_model(model, [packable.sites[name] for name in chosen], config, text, device)
    how = {
        "trellis": config.codebook == TRELLIS,
        "tune": solving.tune,
        "device": device,
        "progress": progress,
    }
    amount = text.sequences, text.length
    text, name, counts = chosen_text(model, text, solving.needs_little, amount, **how, **source)
    plan = packable.plan(config, chosen)
    Calibration(plan, solving, text.ids(model, **source), device, progress, name, counts).run()
    return model


def choose(model: nn.Module, config: KbitConfig) -> tuple[selection.Packable, dict[str, int]]:
    """What can be quantized, and ``{name: bits}`` of what is to be, of a model that can be; errors as of
    ``quantize_model``."""
    quantized = "model" if getattr(model, "hf_quantizer", None) is not None else None
    if quantized := next(iter(packed_layers(model)), quantized):
        raise ValueError(f"{quantized}: found it quantized already, expected a model in 16 or 32 bits")
    if is_linear(model):
        raise ValueError("model: found one linear layer, expected a module that has some; see KbitLinear.from_linear")
    packable = selection.Packable(model)
    chosen = packable.choose(config)
    check_any(model, chosen)
    for site in map(packable.sites.get, chosen):
        name, weight = site.name, site.weight
        if weight.is_meta or hasattr(site.home, "_hf_hook"):
            found = "found it on the meta device, or placed by accelerate, expected it in memory"
            raise ValueError(f"{name}.weight: {found}")
        if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(f"{name}.weight: found {weight.dtype}, expected float32, float16 or bfloat16")
        if not weight.isfinite().all():
            raise ValueError(f"{name}.weight: found NaN or infinite values, expected finite ones")
    return packable, chosen


class Calibration:
    """Quantizes a model of Transformers, as a plan has it, for what its layers are given, one of them after another,
    when it reads ``sequences``, int64 ``[tokens]`` each, of whose tokens some may count more (``counts``)."""

    def __init__(
        self,
        plan: Plan,
        solving: Solving,
        sequences: list[torch.Tensor],
        device: torch.device | str | None = None,
        progress: bool = False,
        source: str = "the data",
        counts: list[float] | None = None,
    ):
        self.plan, self.model, self.solving, self.progress = plan, plan.model, solving, progress
        self.device, self.text, self.source = stream.resolve(device, self.model), sequences, source
        self.solver = METHODS[solving.method]
        self.steps = stream.usual(tuning.STEPS, self.device) if solving.tune is True else int(solving.tune)
        if self.steps and len(sequences) < 2:
            raise ValueError("data: found 1 sequence, expected 2 or more to tune on, one of which is held out")
        size = solving.together(max(map(len, sequences)), self.device)
        if self.steps:
            most = SEQUENCES
            if plan.config.codebook == TRELLIS and not self.solver.DIAGONAL:
                most = max(most, stream.usual(TRELLIS_SEQUENCES, self.device))
            few = slice(None, None, max(len(sequences) // most, 1))
            sequences, counts = sequences[few][:most], counts and counts[few][:most]
            size = min(size, tuning.most_together(sequences, self.device), len(sequences) // 2)
        self.batches = batches_of(sequences, size)
        self.counts: list[torch.Tensor] = []  # of each token of the batches, 1 on average; none where all count alike
        if counts:
            rows = [torch.full(row.shape, count) for row, count in zip(sequences, counts, strict=True)]
            mean = torch.cat(rows).mean()
            self.counts = [each / mean for each in batches_of(rows, size)]
        leave_lost(plan, self.device)
        names = [name for name in plan.decodings if name not in plan.outcome.lost]
        self.tables = [name for name in names if any(plan.sites[each].is_table for each in plan.group(name))]
        # ``{name: name under which its weight is stored}`` of heads that are tied to tables: their rounding errors
        # cost nearly all that those of the tables do, and their inputs are known (docs/quality.md).
        self.heads = {
            called[0]: name
            for name in self.tables
            if (called := [each for each in plan.group(name) if not plan.sites[each].is_table])
        }
        self.names = [*(name for name in names if name not in self.tables), *self.heads]
        # After the batches as dense layers pass them on come, where there is drift, those as quantized ones do.
        self.drifting = not self.solver.DIAGONAL
        self.first = len(self.batches) if self.drifting else 0
        self.errors: list[tuple[float, float]] = []  # of layers' outputs, before and after they were tuned
        self.without_data: list[bool] = []  # for each expert's projection
        self.token_weights: dict[str, list[torch.Tensor]] = {}  # of layers for which tokens do not count alike
        self.outputs: dict[str, list[torch.Tensor]] = {}  # of layers, what errors of their outputs cost together
        self.dimensions: dict[str, int | None] = {}  # which is that of sequences, of what layers are given
        self.finished: Finished | None = None
        self.unmapped: tuple[str, list[str]] | None = None  # a layer that a file has, and what is in it

    def run(self) -> None:
        """Quantizes the model. After an error, or where the run is stopped, the model is as it was, or the log says
        what is packed by then."""
        try:
            self._run()
        except BaseException:
            if packed := packed_layers(self.model):
                resume = self.solving.resume
                logger.error(
                    "hf_kbit: stopped with %d layers packed, %s the last of them, so the model cannot be used as it "
                    "is: load it again, and %s",
                    len(packed),
                    [*packed][-1],
                    "begin anew; with resume=FOLDER the next run can go on"
                    if resume is None
                    else f"the same call with resume={str(resume)!r} goes on after what is finished",
                )
            raise

    @torch.no_grad()
    def _run(self) -> None:
        model, plan = self.model, self.plan
        sites = {name: plan.sites[name] for name in self.names}
        layers, projections = units(model, sites), [site for site in sites.values() if site.kind is KbitProjection]
        with stream.evaluating(model), routed.opened(projections):  # refuses before anything changes
            self.dimensions = check(model, layers, self.batches, self.device)
            if self.drifting:
                head = model.get_output_embeddings()
                names = [name for name, site in sites.items() if site not in projections and site.home is not head]
                trellises = [name for name in names if isinstance(plan.decodings[name], TrellisDecoding)]
                self.token_weights, self.outputs = sensitivity.weigh(
                    model,
                    {name: self.dimensions[name] for name in names},
                    self.batches,
                    self.device,
                    self.progress,
                    {name: sites[name].shape[-2] for name in trellises},
                )
            if self.solving.resume is not None:
                self.finished = Finished(Path(self.solving.resume), self._digest())
        dense = tuning.sharing_copy(model).eval() if self.steps and self.solving.tune_whole else None
        untied = [name for name in self.tables if name not in self.heads.values()]
        quantize_layers(plan, untied, self.device)  # data comes from them
        # Before a layer computes in another dtype: they stand for the weights as the model has them.
        self.empty = {name: empty(site, plan.decodings[self.heads.get(name, name)]) for name, site in sites.items()}
        self.layers, batches = dict(layers), self.batches * (2 if self.drifting else 1)
        self.bar = tqdm(total=len(sites), desc="calibrating", unit="layer", disable=not self.progress)
        with stream.evaluating(model), routed.opened(projections), self.bar:
            stream.stream(model, layers, batches, self.device, self._visit)
        self._map_finished()
        for head in self.heads:
            plan.tie(head)
        if self.without_data:  # in this run: others, before it was killed, had theirs
            logger.log(
                logging.WARNING if any(self.without_data) else logging.INFO,
                "hf_kbit: %d of %d weights of experts are quantized without data: the text sends them too few tokens",
                sum(self.without_data),
                len(self.without_data),
            )
        named = Path(self.source).name  # a card goes to others, whom folders of this machine do not concern
        plan.outcome.calibrated = f"{self.solving.method}, on {size_of(self.text)} of {named}"
        plan.outcome.tuned = self._tuned(dense)
        finish(plan)
        if plan.outcome.tuned:
            logger.info("hf_kbit: tuned: %s", plan.outcome.tuned)

    def _tuned(self, dense: PreTrainedModel | None) -> str:
        """Tunes the whole model towards ``dense``, if there is one; what all tuning has gained, in words."""
        told = []
        if self.errors:
            was, now = (sum(each) / len(self.errors) for each in zip(*self.errors, strict=True))
            told.append(f"squared error of layers' outputs {was:.3g} -> {now:.3g} of their squares")
        if dense is not None:
            trained = [name for name in self.names if name not in self.heads]
            how = self.text, self.steps, self.device, self.finished, self.progress
            with stream.evaluating(self.model):
                told.append(f"then {tuning.tune_model(self.model, dense, trained, *how)}")
        elif self.steps:
            told.append("layers alone")
        return ", ".join(told)

    def _digest(self) -> str:
        """Of all that the result depends on."""
        config, solving = self.plan.config, self.solving
        run = (
            sys.modules["hf_kbit"].__version__,
            torch.__version__,
            self.device.type,
            solving.method,
            solving.batch,
            config,
        )
        run += (self.steps,) if self.steps else ()  # not tune_whole: layers are the same
        run += (sensitivity.BLEND,) if self.token_weights else ()
        run += tuple(each[:, 0].tolist() for each in self.counts)
        run += tuple(self.outputs)
        return digest([*(("ids", row) for row in self.text), *self.model.state_dict().items()], *run)

    def _visit(self, unit: str, run: Callable[..., Any]) -> Iterator[Any]:
        """Quantizes one layer of the model; returns what it computes then, and before that what it did."""
        names = self.layers.pop(unit, ())  # none if it has been here, as layers that a model shares
        self._map_finished()  # before it: what a layer has is where the model is once its visit is over
        dense = {name: self.model.get_submodule(name) for name in names}
        weights = {name: layer.weight for name, layer in dense.items()}
        new = {name: self._empty(name) for name in names}
        if names and not self._restored(unit, new, self.device):
            # Of one that is a layer of the model by itself, such as a head, the outputs would be large.
            alone = [moments.Group(names, True)] if names == [unit] else None
            self._solve(dense, new, run, alone)
            if self.steps and not alone:
                steps = max(self.steps // tuning.LAYER_STEPS, 1)
                how = self.batches, self.first, steps, self.device
                self.errors.append(tuning.tune_layer(self.model, new, run, *how))
            if self.finished is not None:
                tensors = {f"{name}.{own}": x for name, layer in new.items() for own, x in layer.packed.items()}
                untransformed = self.plan.outcome.untransformed
                how = {name: [layer.decoding.to_dict(), untransformed.get(name, "")] for name, layer in new.items()}
                self.finished.save(unit, tensors, how)
        if names and self.finished is not None:
            self.unmapped = unit, names
        for name, layer in new.items():
            self.outputs.pop(name, None)
            site = self.plan.sites[name]
            if site.kind is KbitProjection:
                setattr(site.home, site.own, layer)
                layer.qualified_name = name
            else:
                pack(site, layer.weight, layer.recipe)
        self.bar.update(len(names))
        return self._outputs(dense, weights, run)

    def _outputs(self, dense: dict, weights: dict, run: Callable[..., Any]) -> Iterator[Any]:
        if self.drifting:
            with ExitStack() as stack:
                for name, weight in weights.items():
                    stack.enter_context(self._dense(self.plan.sites[name], dense[name], weight))
                yield from (run(number, last=True) for number in range(self.first))
        yield from (run(self.first + number, last=True) for number in range(len(self.batches)))

    def _empty(self, name: str) -> KbitWeight:
        """A layer that computes as the one of that name will when it is packed, apart from the model."""
        site, recipe, weight = self.plan.sites[name], self.plan.recipe(name), self.empty.pop(name)
        if site.kind is KbitProjection:
            return KbitProjection.of(weight, recipe, site.transposed).train(site.home.training)
        layer = twin(site.home)
        vars(layer).pop("forward", None)  # of a walk through the model
        site.kind.pack(layer, weight, recipe)
        return layer

    @staticmethod
    @contextmanager
    def _dense(site: Site, dense: nn.Module, weight: nn.Parameter) -> Iterator[None]:
        """Inside, a packed layer is what it was before."""
        if site.kind is not KbitProjection:
            with unpacked(site, weight):
                yield
            return
        packed = site.layer
        setattr(site.home, site.own, dense)
        try:
            yield
        finally:
            setattr(site.home, site.own, packed)

    def _restored(self, unit: str, new: dict[str, KbitWeight], device: torch.device) -> bool:
        """Fills the layers with what a run has finished, this one or one that was killed, if it has."""
        if self.finished is None or (found := self.finished.load(unit)) is None:
            return False
        tensors, how = found
        for name, layer in new.items():
            entries, untransformed = how[name]
            decoding = type(layer.decoding).from_dict(entries, layer.bits, name)
            stored = {own: tensors[f"{name}.{own}"].to(device) for own in decoding.layout(layer.shape)}
            layer.load(Packed(stored, decoding))
            self._tell(name, untransformed)
        return True

    def _map_finished(self) -> None:
        """Has the layers that were saved or read last, where the model is on a CPU, mapped from their file, so that
        memory need not hold them."""
        if self.unmapped is not None and self.model.device.type == "cpu":
            unit, names = self.unmapped
            self._restored(unit, {name: self.plan.sites[name].layer for name in names}, self.model.device)
        self.unmapped = None

    def _solve(self, dense: dict, new: dict, run: Callable[..., Any], alone: list[moments.Group] | None) -> None:
        """Gives each of the ``new`` layers its weight, in the order in which they are called."""
        done = {}

        def quantized(number):
            with moments.standing_in(dense, done):
                run(self.first + number)

        for group in alone or moments.groups(dense, partial(run, self.first)):
            # A table that made up for the drift of the head's inputs would be another one to look-ups.
            made_up = self.drifting and group.names[0] not in self.heads
            runs = [
                (partial(quantized, number), partial(run, number) if made_up else None)
                for number in range(len(self.batches))
            ]
            like = dense[group.names[0]]
            if isinstance(like, routed.DenseProjection):
                (name,) = group.names
                around = self.model.get_submodule(name.rpartition(".")[0])
                shares = routed.shares(like, around, group.once, runs, self.solver.DIAGONAL, self.counts)
                few, why = round_projection(name, new[name], like, shares, self.solver)
                self.without_data += few
                self._tell(name, why)
            else:
                weights, dimension = self._weights(group.names), self.dimensions[group.names[0]]
                found = moments.moments(like, group, runs, self.solver.DIAGONAL, weights, dimension)
                for name in group.names:
                    how = found, self.solver, self.outputs.get(name)
                    self._tell(name, round_linear(name, new[name], dense[name], *how))
            done |= {name: new[name] for name in group.names}

    def _tell(self, name: str, untransformed: str) -> None:
        if untransformed:
            self.plan.outcome.untransformed[name] = untransformed

    def _weights(self, names: list[str]) -> list[torch.Tensor]:
        """Of the tokens of each batch, the mean over these layers; none if they count alike."""
        found = [self.token_weights[name] for name in names if name in self.token_weights]
        means = [sum(of_batch) / len(found) for of_batch in zip(*found, strict=True)]
        if not (means and self.counts):
            return means or self.counts
        return [x * y for x, y in zip(means, self.counts, strict=True)]
