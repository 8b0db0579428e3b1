"""How weights are chosen while a model is calibrated: the methods, and their settings."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kbit.calibration import feedback, stream, tuning, weighted
from hf_kbit.calibration.data import Text
from hf_kbit.nn.site import Site
from hf_kbit.plan.allocation import stored_weights
from hf_kbit.plan.config import KbitConfig

# A solver is a module with ``solve(weight, moments, codebook) -> planes, absmax`` and ``DIAGONAL``: whether moments
# are the diagonal of the sum of x @ x.T, or all of it.
METHODS: dict[str, ModuleType] = {"feedback": feedback, "weighted": weighted}
TOGETHER = {"cpu": 1 << 13, "": 1 << 14}  # tokens that go through a layer at a time; "" is any device but a CPU


@dataclass(frozen=True)
class Solving:
    """How weights are chosen while a model is calibrated.

    Attributes:
        method: ``"feedback"``: the weights not yet rounded make up for the errors of those that are; needs K * K
            float32, a few times over, for a layer of K in_features. Tokens of a causal language model count by what
            errors cost there, which needs the whole model on the device once, if it fits. ``"weighted"``: only column
            scales are chosen, by the inputs' mean squares, or, without a transform, the scales of blocks; many times
            as quick.
        tune: then train what is stored, for so many steps (docs/calibration.md): scales and codes of each layer of the
            model, of trellises scales alone, a fifth of the steps, on its output; then scales, norms and biases of the
            whole model on how it predicted the next token in 16 bits. The bytes stay as many; what is gained on
            sequences that were held out is in the log and the model card. True: 1000 steps, or 200 on a CPU. Of the
            data's sequences 128 at most are for the layers, of trellises 512 on a GPU. Causal language models only.
        tune_whole: whether ``tune`` trains the whole model too, for which there must be memory for it some six times
            in 16 bits, and for its activations. False: its layers alone.
        batch: sequences that go through a layer at a time. None: as many as have 16,384 tokens, or 8,192 on a CPU.
        resume: a folder, which gets a file for each finished layer; the same call with it goes on where one was
            killed, and gives the same bytes. Remove it once the model is saved.
    """

    method: str = "feedback"
    tune: int | bool = 0
    tune_whole: bool = True
    batch: int | None = None
    resume: str | Path | None = None

    @property
    def needs_little(self) -> bool:
        """Whether all that counts is how large inputs are on average, which few tokens tell."""
        return METHODS[self.method].DIAGONAL and not self.tune

    def together(self, longest: int, device: torch.device) -> int:
        """How many sequences go through a layer at a time, of so many tokens at most."""
        return self.batch or max(stream.usual(TOGETHER, device) // longest, 1)

    def check(self, config: KbitConfig) -> None:
        """Refuses what cannot be done, whatever the model and the data are."""
        if self.method not in METHODS:
            raise ValueError(f"method: found {self.method!r}, expected one of {sorted(METHODS)}")
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"batch: found {self.batch}, expected 1 or more")
        if config.scale != "search":
            raise ValueError(f"scale: found {config.scale!r}, expected 'search' or none")
        if not isinstance(self.tune, int):
            raise TypeError(f"tune: found {self.tune!r}, expected a number of steps, or True")
        if self.tune < 0:
            raise ValueError(f"tune: found {self.tune}, expected 0 or more steps")

    def check_model(
        self, model: PreTrainedModel, sites: Iterable[Site], config: KbitConfig, text: Text, device
    ) -> None:
        """Refuses a model of which these layers cannot be calibrated, or tuned."""
        if not stream.reads_tokens(model):
            raise ValueError(f"model: found {type(model).__name__}, expected a model that reads token ids (input_ids)")
        devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
        if len(devices) > 1:
            raise ValueError(f"model: found it on {sorted(devices)}, expected one device")
        if self.tune and not stream.predicts_tokens(model):
            raise ValueError(
                f"tune: found {type(model).__name__}, expected a causal language model: what is trained on is how it "
                "predicts the next token"
            )
        if self.tune and self.tune_whole:
            tuning.check_room(model, stored_weights(sites, config), text.tokens, stream.resolve(device, model))


def sort(settings: dict[str, Any], *kinds: type) -> tuple[Any, ...]:
    """An instance of each of these dataclasses, with those of the settings that are its fields; and the settings that
    are none's."""
    left, found = dict(settings), []
    for kind in kinds:
        found.append(kind(**{each.name: left.pop(each.name) for each in fields(kind) if each.name in left}))
    return *found, left
