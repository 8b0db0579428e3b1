"""Weights that are converted on another stream than the one that their tensors came on."""

from types import SimpleNamespace

import pytest
import torch
from transformers.core_model_loading import ConversionOps

from hf_kbit.integrations.transformers import exl3, streams


def below(kind: type) -> list[type]:
    return [each for own in kind.__subclasses__() for each in (own, *below(own))]


KINDS = [each for each in below(ConversionOps) if each.__module__.startswith("hf_kbit")]


def test_conversions_are_found():
    assert {exl3.AssembleLinear, exl3.AssembleExperts, exl3.Cut} < set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_each_conversion_holds_what_it_is_given_first(kind, monkeypatch):
    class Held(Exception):
        pass

    def stop(given):
        raise Held(given)

    monkeypatch.setattr(streams, "hold", stop)
    given = {"weight": [torch.zeros(1)]}
    with pytest.raises(Held) as found:
        kind.__new__(kind).convert(given, source_patterns=["weight"])
    assert found.value.args == (given,)


def test_tensors_of_a_gpu_are_held(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda, device = True, "a GPU"

        def record_stream(self, stream):
            held.append((id(self), stream))

    held = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    tensors = [torch.zeros(2).as_subclass(OnGpu) for _ in range(3)]
    streams.hold({"few": tensors[:2], "one": tensors[2], "on the CPU": [torch.zeros(2)], "packed": SimpleNamespace()})
    assert held == [(id(tensor), "the stream of a GPU") for tensor in tensors]


@pytest.mark.gpu
def test_memory_is_held_until_a_stream_that_lags_has_read_it():
    large, stream = torch.randn(8192, 8192, device="cuda"), torch.cuda.Stream()
    value = torch.ones(1 << 20, device="cuda")
    place = value.data_ptr()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):  # some 20 ms each
            large @ large
        (cut,) = exl3.Cut(1 << 19).convert({"bias": [value]}, full_layer_name="bias").values()
        assert not stream.query()
    del value
    later = [torch.zeros(1 << 20, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    assert torch.equal(cut, torch.ones_like(cut))
    assert place not in [each.data_ptr() for each in later]
