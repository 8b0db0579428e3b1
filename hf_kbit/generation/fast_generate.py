"""``hf_kbit.fast_generate``, for ``model.generate(..., custom_generate=hf_kbit.fast_generate)``.

``generate`` launches the kernels of a step, waits for its token, and only then launches the next step. Here a step is
one CUDA graph, launched before the token of the step before has been read.
"""

from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_kbit.generation.decode_step import BACKENDS, Backend, DecodeStep
from hf_kbit.generation.sampling import Sampler
from hf_kbit.generation.static_cache import CACHE
from hf_kbit.generation.unsupported import check_cache, check_processes, check_supported


def fast_generate(
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
    """A ``custom_generate`` for greedy decoding and sampling that gives the token ids of ``generate``, from quantized
    models and others. On a CUDA GPU each step is one CUDA graph; ``docs/decoding.md`` has the limits.

    Args:
        model: a decoder of Transformers, on one device, or shared by processes under tensor or expert parallelism.
        input_ids: the prompt, int64 ``[batch, tokens]``, padded on the left.
        logits_processor: made by ``generate``, as the next two arguments are.
        stopping_criteria: with the stop strings.
        generation_config: complete.
        synced_gpus: refused.
        streamer: gets the tokens, a few steps late.
        tokenizer: not used here.
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
    >>> model.generate(ids, max_new_tokens=4, eos_token_id=None, custom_generate=fast_generate).shape
    torch.Size([1, 7])
    """
    check_supported(model, input_ids, generation_config, synced_gpus, assistant_model, model_kwargs)
    if (group := _tensor_parallel_group(model)) is not None:
        check_processes(generation_config, group, model.device)
        if model.device.type == "cuda":
            from hf_kbit.generation.all_reduce import connect  # which takes private modules of torch

            connect(group, model.device)
    backend = BACKENDS.get(model.device.type, Backend())
    prompt, longest = input_ids.shape[1], stopping_criteria.max_length
    with torch.cuda.device_of(input_ids):
        model_kwargs[CACHE] = DynamicCache(config=model.config.get_text_config(decoder=True))
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
        embeddings = model_kwargs.get("inputs_embeds")
        check_cache(model, model_kwargs[CACHE], (input_ids if embeddings is None else embeddings).shape[1])
        sampler = Sampler(input_ids, logits_processor, stopping_criteria, generation_config)
        sampler(outputs.logits[:, -1], prompt + 1)
        reader = _Reader(sampler.reports, backend.ahead, streamer)
        reader.add(prompt)
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
        compiled, step = not generation_config.disable_compile, None
        for length in range(prompt + 2, longest + 1):
            if reader.ended:
                break
            step = step or DecodeStep(model, sampler, longest - prompt - 1, backend, compiled, model_kwargs)
            step(length)
            reader.add(length - 1)
        new_tokens = reader.finish()
    if streamer is not None:
        streamer.end()
    return sampler.sequences(prompt + new_tokens)


def _tensor_parallel_group(model) -> ProcessGroup | None:
    """The processes that share the model, each of which runs the same steps."""
    mesh = getattr(model, "_device_mesh", None)
    return None if mesh is None else (mesh["tp"] if mesh.ndim > 1 else mesh).get_group()


class _Reader:
    """Copies tokens to the host on a stream of its own, and looks at them ``ahead`` steps after their launch."""

    def __init__(self, reports: Tensor, ahead: int, streamer: BaseStreamer | None):
        self.reports, self.ahead, self.streamer = reports, ahead, streamer
        self.stream = torch.cuda.Stream(reports.device) if reports.is_cuda else None
        self.pending, self.read, self.ended = deque(), 0, False

    def add(self, place: int) -> None:
        """Takes the report of the step launched last, on this place of the sequences."""
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
        """The number of new tokens of each sequence, once nothing of this call is running any more."""
        while self.pending:
            self._look()
        return self.read

    def _look(self) -> None:
        report, event = self.pending.popleft()
        if event is not None:
            event.synchronize()
        if self.ended:
            return  # was computed past the end
        tokens, unfinished, finite = report
        if not finite.all():
            raise ValueError(
                "hf_kbit.fast_generate: found probabilities that are NaN or all 0, expected finite logits"
            )
        if self.streamer is not None:
            self.streamer.put(tokens)
        self.read += 1
        self.ended = not unfinished.any()


def pass_all_on(extract: Callable) -> Callable:
    """Wraps ``GenerationMixin._extract_generation_mode_kwargs``, which keeps streamers, tokenizers and assistants from
    callables."""

    @wraps(extract)
    def passing(self, custom_generate, *args, **kwargs):
        return extract(self, None if custom_generate is fast_generate else custom_generate, *args, **kwargs)

    return passing
