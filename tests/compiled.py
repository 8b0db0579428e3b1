"""What tests of compiled kernels on GPUs share: which kernels there are, and that streams and graphs do not show."""

import pytest
import torch

from hf_kbit.ops import native

# The ``pytestmark`` of a file for GPUs alone.
NEEDED = [
    pytest.mark.gpu,
    pytest.mark.skipif(not native.library("cuda").loaded, reason=f"CUDA library: {native.library('cuda').missing}"),
]
FORMS = pytest.mark.parametrize("tiled", [False, True], ids=["planes", "tiles"])


def cuda_arch() -> int:
    """The architecture (800 for compute capability 8.0) that products are planned for: of the code that runs on the
    current GPU, which may have been built for an older one. 0 without a GPU or library."""
    return native._cuda_number("arch")


def is_hopper() -> bool:
    return cuda_arch() == 900


def assert_replayed(run, inputs: list[tuple[torch.Tensor, ...]]) -> None:
    """A CUDA graph of ``run`` reads new inputs at each replay; the first are those that it is captured with."""
    held = [tensor.clone() for tensor in inputs[0]]
    run(*held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(*held)
    for given in inputs:
        for tensor, value in zip(held, given, strict=True):
            tensor.copy_(value)
        graph.replay()
        torch.testing.assert_close(found, run(*given), rtol=0, atol=0)


def assert_same_on_streams(run, inputs: list[torch.Tensor], turns: int) -> None:
    """Nothing is shared between calls: streams at once give what each gives alone, to the last bit."""
    expected = [run(x) for x in inputs]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in inputs], [[] for _ in inputs]
    for _ in range(turns):
        for x, stream, outputs in zip(inputs, streams, found, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(run(x))
    torch.cuda.synchronize()
    for outputs, alone in zip(found, expected, strict=True):
        assert all(torch.equal(output, alone) for output in outputs)
