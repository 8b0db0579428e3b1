"""``hf_kbit.decode``, for ``model.generate(..., custom_generate=hf_kbit.decode)``.

``generate`` itself launches the kernels of a step, waits for its token, and only then launches the next step: much of
the time the GPU waits. Here a step is one CUDA graph, launched before the token of the step before has been read. In
the order of a call: ``refusals.py`` names what cannot be done; the prompt goes through the model as in ``generate``;
``cache.py`` gives its keys and values places for all tokens to come; ``choice.py`` makes tokens of logits; ``step.py``
runs a step, with ``attention.py``; and tokens reach the host a few steps late.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_kbit.decoding.cache import CACHE
from hf_kbit.decoding.choice import Choice
from hf_kbit.decoding.refusals import refuse, refuse_cache, refuse_in_processes
from hf_kbit.decoding.step import WAYS, Step, Way


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_model: PreTrainedModel | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """A ``custom_generate`` of Transformers' ``generate`` that does not wait for the host: on a CUDA GPU each step is
    one CUDA graph, launched before the token of the step before has been read.

    It takes what ``generate`` takes for greedy decoding and for sampling, and gives the same token ids, of quantized
    models and of others; ``docs/decoding.md`` has its limits. The arguments are those that ``generate`` passes.

    Args:
        model: a decoder of Transformers, on one device, or shared by processes under tensor or expert parallelism.
        input_ids: the prompt, int64 ``[batch, tokens]``, padded on the left.
        logits_processor: what ``generate`` made of temperature, penalties and the like, and of those given to it.
        stopping_criteria: likewise.
        generation_config: likewise.
        synced_gpus: refused.
        streamer: gets the tokens, a few steps late.
        tokenizer: of stop strings, which are among the stopping criteria by now.
        assistant_model: refused.
        model_kwargs: the model's other inputs.

    Returns:
        Token ids, int64 ``[batch, length]``: the prompt, the new tokens, and padding after the end of a sequence.

    Raises:
        ValueError: for what it cannot do, such as beams, before anything runs; and for probabilities that are NaN.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> size = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1)
    >>> model = LlamaForCausalLM(LlamaConfig(**size, vocab_size=64)).eval()
    >>> ids = torch.tensor([[1, 5, 9]])
    >>> model.generate(ids, max_new_tokens=4, eos_token_id=None, custom_generate=decode).shape
    torch.Size([1, 7])
    """
    refuse(model, input_ids, generation_config, synced_gpus, assistant_model, model_kwargs)
    if (group := _processes(model)) is not None:
        refuse_in_processes(generation_config, group, model.device)
        if model.device.type == "cuda":
            from hf_kbit.decoding.sums import connect  # which takes private modules of torch

            connect(group, model.device)
    way = WAYS.get(model.device.type, Way())
    prompt, longest = input_ids.shape[1], stopping_criteria.max_length
    with torch.cuda.device_of(input_ids):
        model_kwargs[CACHE] = DynamicCache(config=model.config.get_text_config(decoder=True))
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
        embeddings = model_kwargs.get("inputs_embeds")
        refuse_cache(model, model_kwargs[CACHE], (input_ids if embeddings is None else embeddings).shape[1])
        choice = Choice(input_ids, logits_processor, stopping_criteria, generation_config)
        choice(outputs.logits[:, -1], prompt + 1)
        reports = _Reports(choice.reports, way.ahead, streamer)
        reports.add(prompt)
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
        compiled = not generation_config.disable_compile
        with model._optimize_model_for_decode(), _without_backward_hooks(model):
            step = None
            for length in range(prompt + 2, longest + 1):
                if reports.ended:
                    break
                step = step or Step(model, choice, longest - prompt - 1, way, compiled, model_kwargs)
                step(length)
                reports.add(length - 1)
        new = reports.finish()
    if streamer is not None:
        streamer.end()
    return choice.tokens(prompt + new)


def _processes(model) -> ProcessGroup | None:
    """Those that share the model, each of which runs the same steps."""
    mesh = getattr(model, "_device_mesh", None)
    return None if mesh is None else (mesh["tp"] if mesh.ndim > 1 else mesh).get_group()


@contextmanager
def _without_backward_hooks(model) -> Iterator[None]:
    """Inside, the model has none: plans of tensor parallelism put some on norms, and they cut compiled code up."""
    hooked = [(module, module._backward_hooks) for module in model.modules() if module._backward_hooks]
    for module, _ in hooked:
        module._backward_hooks = OrderedDict()
    try:
        yield
    finally:
        for module, hooks in hooked:
            module._backward_hooks = hooks


class _Reports:
    """Tokens on the host, ``ahead`` steps after they were launched: it waits for none but the oldest. They are copied
    beside the steps, which would else wait for each copy."""

    def __init__(self, reports: Tensor, ahead: int, streamer):
        self.reports, self.ahead, self.streamer = reports, ahead, streamer
        self.stream = torch.cuda.Stream(reports.device) if reports.is_cuda else None
        self.pending, self.read, self.ended = deque(), 0, False

    def add(self, place: int) -> None:
        """Takes what was launched last, for this place, and looks at what was launched ``ahead`` steps before."""
        report, event = self.reports[place], None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                report = report.to("cpu", non_blocking=True)
                event = self.stream.record_event()
        self.pending.append((report, event))
        if len(self.pending) > self.ahead:
            self._look()

    def finish(self) -> int:
        """How many new tokens there are to each sequence; nothing of this call is running any more."""
        while self.pending:
            self._look()
        return self.read

    def _look(self) -> None:
        report, event = self.pending.popleft()
        if event is not None:
            event.synchronize()
        if self.ended:
            return  # was computed past the end
        tokens, goes_on, well = report
        if not well.all():
            raise ValueError("hf_kbit.decode: found probabilities that are NaN or all 0, expected finite logits")
        if self.streamer is not None:
            self.streamer.put(tokens)
        self.read += 1
        self.ended = not goes_on.any()


def pass_all_on(extract: Callable) -> Callable:
    """Wraps ``GenerationMixin._extract_generation_mode_kwargs``, which keeps streamers, tokenizers and assistants from
    callables."""

    @wraps(extract)
    def passing(self, custom_generate, *args, **kwargs):
        return extract(self, None if custom_generate is decode else custom_generate, *args, **kwargs)

    return passing
