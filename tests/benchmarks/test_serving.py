"""benchmarks/serving.py, with an engine that takes a millisecond of a clock of its own for every step."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

BLOCKS = 22  # of 16 tokens in the cache: room for three sequences after 32 tokens, not after 64
START = {"what": "start", "seconds": 20.0, "kv_tokens": 4000, "kernels": "Some"}
LINES = {
    "bf16": [
        START,
        {"what": "decode", "prompt": 8, "sequences": 4, "fits": True, "ms": 4.0},
        {"what": "decode", "prompt": 8, "sequences": 16, "fits": False},
        {"what": "saturation", "prompt": 8, "tokens_per_s": 1000.0},
    ],
    "hf_kbit-4": [
        START | {"kv_tokens": 8000},
        {"what": "decode", "prompt": 8, "sequences": 4, "fits": True, "ms": 3.0},
        {"what": "decode", "prompt": 8, "sequences": 16, "fits": True, "ms": 5.0},
        {"what": "saturation", "prompt": 8, "tokens_per_s": 900.0},
    ],
    "gptq": [
        START,
        {"what": "decode", "prompt": 8, "sequences": 4, "fits": True, "ms": 2.0},
        {"what": "saturation", "prompt": 8, "tokens_per_s": 1200.0},
    ],
    "gptq-humming": [{"what": "failed", "error": "ValueError: not installed"}],
}
TABLE = """tiny, 2 layers, none

|  | bf16 | hf_kbit-4 | gptq |
|---|---:|---:|---:|
| start, s | 20.0 | **20.0 (1.00)** | 20.0 (1.00) |
| its tokens, thousands | 4.00 | **8.00 (2.00)** | 4.00 (1.00) |
| decode, prompt 8, 4 sequences, ms a token | 4.00 | 3.00 (0.75) | **2.00 (0.50)** |
| decode, prompt 8, 16 sequences, ms a token | no room | 5.00 |  |
| saturation, tokens a second | 1000 | 900 (0.90) | **1200 (1.20)** |

- bf16: Some
- hf_kbit-4: Some
- gptq: Some
- gptq-humming failed: ValueError: not installed
"""


class Engine:
    """Gives the tokens of a step one call later, as vLLM does that schedules ahead."""

    def __init__(self):
        self.now, self.left, self.ahead = 0.0, {}, []
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 100)
        cache = SimpleNamespace(num_gpu_blocks=BLOCKS, block_size=16, gpu_memory_utilization=0.9)
        self.vllm_config = SimpleNamespace(cache_config=cache)

    def add_request(self, name, prompt, sampling):
        assert prompt["type"] == "token" and sampling.ignore_eos
        self.left[name] = sampling.max_tokens

    def step(self):
        self.now += 0.001
        done, self.ahead = self.ahead, list(self.left)
        self.left = {name: left - (name in done) for name, left in self.left.items()}
        given = [name for name in done if name in self.left]
        self.left = {name: left for name, left in self.left.items() if left}
        own = SimpleNamespace(token_ids=[1], logprobs=[{1: SimpleNamespace(logprob=-1.0)}])
        return [SimpleNamespace(request_id=name, outputs=[own]) for name in given]

    def has_unfinished_requests(self):
        return bool(self.left)

    def get_num_unfinished_requests(self):
        return len(self.left)

    def abort_request(self, names):
        for name in names:
            del self.left[name]


@pytest.fixture
def serving(benched, monkeypatch):
    """What measures, beside a ``vllm`` whose ``LLM`` has the engine above; ``serving.kernels`` are those it runs."""
    module, engine = benched("serving_process"), Engine()
    module.kernels = ["UnquantizedLinearMethod"]
    found = {"weights": 2e9, "kv": 1e9, "kernels": module.kernels}
    vllm, sampling = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.LLM = lambda path, **options: SimpleNamespace(llm_engine=engine, collective_rpc=lambda function: [found])
    vllm.SamplingParams = SimpleNamespace
    sampling.RequestOutputKind = SimpleNamespace(DELTA=1)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: engine.now))
    return module


def serve(module, method: str) -> list[dict]:
    return list(module.serve("folder", method, tensor_parallel=1, sequences=[1, 3], prompts=[32, 64]))


def test_what_is_measured(serving):
    """A token of every sequence takes a step, the first a call more; where the cache has no room it is said."""
    start, *first, alone, together, alone_longer, no_room, saturation = serve(serving, "bf16")
    assert (start["weights_GB"], start["kv_tokens"], start["kernels"]) == (2, 16 * BLOCKS, "UnquantizedLinearMethod")
    assert [(line["prompt"], line["ms"]) for line in first] == [(32, pytest.approx(2)), (64, pytest.approx(2))]
    for line, prompt, count in ((alone, 32, 1), (together, 32, 3), (alone_longer, 64, 1)):
        assert (line["prompt"], line["sequences"], line["fits"]) == (prompt, count, True)
        assert line["ms"] == pytest.approx(1)
    assert no_room == {"what": "decode", "prompt": 64, "sequences": 3, "fits": False}
    assert saturation["tokens_per_s"] == pytest.approx(6 * 128 / 0.129)


@pytest.mark.parametrize(
    ("method", "kernels", "refused"),
    [
        ("bf16", ["KbitLinearMethod"], True),
        ("gptq", ["UnquantizedLinearMethod"], True),  # as vLLM makes it of a checkpoint without weights
        ("hf_kbit-4", ["KbitLinearMethod", "UnquantizedLinearMethod"], True),
        ("hf_kbit-4", ["KbitLinearMethod of int8"], True),
        ("hf_kbit-4-int8", ["KbitLinearMethod"], True),
        ("hf_kbit-4-int8", ["KbitLinearMethod of int8"], False),
        ("gptq-marlin", ["MacheteLinearKernel"], True),
        ("gptq-machete", ["MacheteLinearKernel"], False),
        ("fp8", ["CutlassFP8ScaledMMLinearKernel"], False),
    ],
)
def test_what_runs_is_what_was_asked_for(serving, method, kernels, refused):
    serving.kernels[:] = kernels
    if not refused:
        assert serve(serving, method)[0]["kernels"] == kernels[0]
        return
    with pytest.raises(RuntimeError, match=rf"found {', '.join(kernels)}, expected those of {method}"):
        serve(serving, method)


def test_8_bit_inputs_are_another_method_of_one_checkpoint(benched):
    module = benched("serving")
    assert module.checkpoint_of("hf_kbit-3-int8") == module.checkpoint_of("hf_kbit-3") == "hf_kbit-3"
    plain, rounded = module.style("hf_kbit-3"), module.style("hf_kbit-3-int8")
    assert plain["color"] == rounded["color"] and plain["label"] != rounded["label"]


def test_gptq_checkpoint(benched):
    """Decoded as its format says, it is the weight, but for half a step of rounding, and a half's of the scale."""
    torch.manual_seed(0)
    weight = torch.randn(16, 256, dtype=torch.bfloat16)
    stored = benched("serving_process").gptq(weight)
    assert all(tensor.dtype == torch.int32 for name, tensor in stored.items() if name != "scales")
    for row in range(16):
        for column in range(256):
            group = stored["g_idx"][column]
            code = stored["qweight"][column // 8, row].item() >> 4 * (column % 8) & 15
            zero = stored["qzeros"][group, row // 8].item() >> 4 * (row % 8) & 15
            scale = stored["scales"][group, row].item()
            assert scale * (code - (zero + 1)) == pytest.approx(weight[row, column].item(), abs=0.505 * scale)


def test_lines_and_tables(benched, monkeypatch, capsys, tmp_path):
    """A later run finds what it is compared with in the file; a method that fails does not end the run."""
    module = benched("serving")

    def in_a_process(function, log, **arguments):
        log.write_text("init engine (profile, create kv cache, warmup model) took 9.50 s (compilation: 6.25 s)\n")
        made = {"path": "", "GB": 1.0, "seconds": 1.0}
        yield from ([made] if function == "make" else LINES[arguments["method"]])

    monkeypatch.setattr(module, "in_a_process", in_a_process)
    file = tmp_path / "lines.jsonl"
    options = ["--folder", str(tmp_path), "--shape", "tiny", "--json", str(file)]
    for method in (["bf16"], ["hf_kbit-4", "gptq", "gptq-humming"]):
        module.run_main(*options, "--methods", ",".join(method), json_lines=False)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["method"] for line in lines] == [method for method, own in LINES.items() for _ in own]
    assert (lines[0]["engine_s"], lines[0]["compile_s"]) == (9.5, 6.25)
    capsys.readouterr()
    module.run_main("--from", str(file), "--table", json_lines=False)
    assert capsys.readouterr().out.strip().splitlines() == [*TABLE.strip().splitlines()]


def test_plot(benched, monkeypatch, tmp_path):
    figures = pytest.importorskip("matplotlib.figure")
    drawn, save = [], figures.Figure.savefig
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, file: (drawn.append(self), save(self, file)))
    where = {"shape": "tiny", "layers": 2, "tensor_parallel": 1, "gpu": "none", "vllm": "0", "date": "today"}
    file = tmp_path / "lines.jsonl"
    lines = [json.dumps(where | {"method": method} | line) for method, own in LINES.items() for line in own]
    file.write_text("\n".join(lines))
    benched("serving").run_main("--from", str(file), "--plot", str(tmp_path / "plot.png"), json_lines=False)
    decode, saturation = drawn[0].axes
    assert [list(line.get_ydata()) for line in decode.lines] == [[4], [3, 5], [2]]
    assert [bar.get_height() for bar in saturation.patches] == [1000, 900, 1200]


@pytest.mark.slow
def test_processes(benched, monkeypatch, tmp_path):
    """Checkpoints are made in a process of their own; what vLLM raises in another is a line."""
    (tmp_path / "vllm.py").write_text("raise ImportError('no vLLM here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = ["--folder", str(tmp_path), "--shape", "tiny", "--methods", "hf_kbit-3,gptq"]
    lines = benched("serving").run_main(*options)
    assert [line["error"] for line in lines] == ["ImportError: no vLLM here"] * 2
    for name in ("tiny-2-hf_kbit-3", "tiny-2-gptq"):
        assert len(list((tmp_path / name).glob("layer-*.safetensors"))) == 2
    assert "Traceback" in (tmp_path / "gptq.log").read_text()
