"""Quantizing while loading takes memory for the quantized model and a few weights, not for the 16-bit model."""

import gc
import json
import os
import weakref
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_kbit import KbitConfig, KbitLinear
from hf_kbit.format.reference import QUANTIZE_SLICE
from hf_kbit.integrations.transformers.conversions import KbitQuantize
from hf_kbit.ops import native


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A bfloat16 Llama of three layers with seven linear layers each, in several files."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4
    )
    directory = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory, max_shard_size="100KB")
    return directory


@pytest.fixture
def no_garbage_collection():
    """Leaves alone what only the garbage collector would free."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def quantize(directory):
    return AutoModelForCausalLM.from_pretrained(directory, quantization_config=KbitConfig(bits=2))


def test_at_most_two_weights_are_alive_at_a_time(tiny, monkeypatch, no_garbage_collection):
    storages, alive = [], []
    convert = KbitQuantize.convert

    def record(self, input_dict, *args, **kwargs):
        for value in input_dict.values():
            for tensor in value if isinstance(value, list) else [value]:
                storages.append(StorageWeakRef(tensor.untyped_storage()))
                del tensor
        del value
        alive.append(sum(not storage.expired() for storage in storages))
        return convert(self, input_dict, *args, **kwargs)

    monkeypatch.setattr(KbitQuantize, "convert", record)
    model = quantize(tiny)
    assert len(alive) == sum(isinstance(module, KbitLinear) for module in model.modules()) == 21
    assert max(alive) <= 2
    assert all(storage.expired() for storage in storages)


def test_a_dropped_model_is_freed_at_once(tiny, no_garbage_collection):
    """As one that is not quantized is: ``del model`` makes room for the next one."""
    model = quantize(tiny)
    gc.collect()
    weight = weakref.ref(model.model.layers[0].mlp.down_proj.weight)
    del model
    assert weight() is None


# --- a model of 103 MB, watched from inside its process -------------------------------------------

HIDDEN, INTERMEDIATE, LAYERS = 1024, 2816, 4
LARGEST = HIDDEN * INTERMEDIATE  # numbers in the largest weight

WATCH = r"""
import ctypes, json, re, threading
import torch
from hf_kbit import KbitConfig
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
# glibc gives freed memory back at once, so that what is resident is what is alive: M_MMAP_THRESHOLD, M_ARENA_MAX.
glibc = ctypes.CDLL(None)
glibc.mallopt(-3, 65536), glibc.mallopt(-8, 1)

def anonymous():
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status.read())[1])

def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, quantization_config=KbitConfig(bits=2))

def watch():
    while not done.wait(0.0005):
        samples.append(anonymous())

load(tiny)  # imports and caches are no part of what is measured
glibc.malloc_trim(0)
samples, done = [anonymous()], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
model = load(large)
done.set()
watcher.join()
samples.append(anonymous())  # the watcher may have missed the last page
print(json.dumps({
    "samples": len(samples),
    "peak": max(samples) - samples[0],
    "end": samples[-1] - samples[0],
    "size": sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
}))
"""


def write_large(directory: Path) -> int:
    """Writes a bfloat16 Llama in several files, and returns its size."""
    shape = dict(vocab_size=64, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS)
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=16)).bfloat16()
    model.save_pretrained(directory, max_shard_size="20MB")
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads RssAnon from /proc")
def test_the_peak_is_the_quantized_model_and_a_few_weights(tiny, fresh):
    """Anonymous memory, which no other use of the mapped checkpoint files can blur; see the first test for those."""
    with TemporaryDirectory() as large:  # pytest would keep tmp_path after the run
        dense = write_large(Path(large))
        found = json.loads(fresh.run(f"tiny, large = {str(tiny)!r}, {large!r}\n{WATCH}").splitlines()[-1])
    assert found["samples"] > LAYERS  # as many as files, at the least
    if native.library("cpu").loaded:
        # Compiled code has no temporaries, and mapped 16-bit weights are not anonymous: a third of the largest weight
        # in float32, divided by column scales, and rotated; what a slice needs is small. Measured: 1.2.
        bound = found["size"] + 1.5 * torch.float32.itemsize * LARGEST
    else:
        # Each weight is quantized in one slice (reference.QUANTIZE_SLICE), whose peak is in the search for the codes:
        # the weight in float32, the same divided by its scales, and the codes in int32: 3 times 4 bytes a number. The
        # fourth covers what is small: uint8 codes, words, Python objects. Measured: 3.2, with torch 2.13.
        assert LARGEST <= QUANTIZE_SLICE
        bound = found["size"] + 4 * torch.float32.itemsize * LARGEST
    assert bound < 0.7 * dense
    assert found["end"] <= found["peak"] <= bound
