"""What the benchmarks share: command line, report, and the timing of calls on a GPU whose inputs are not in its L2."""

import argparse
import itertools
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import hf_kbit

COLD_BYTES = 256 << 20  # several times the L2 of any GPU


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def copies(size: int) -> int:
    """How many inputs of ``size`` bytes to walk through, so that none is still in L2 when its turn comes again."""
    return max(2, -(-COLD_BYTES // size))


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def some_of(choices: list[str]) -> Callable[[str], list[str]]:
    """The type of an option that names some of ``choices``."""

    def chosen(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(choices):
            raise argparse.ArgumentTypeError(f"found {', '.join(unknown)}, expected some of {', '.join(choices)}")
        return names

    return chosen


class Report:
    """Prints a line for each measurement and keeps it for the file of JSON lines, with ``context`` in front."""

    def __init__(self, file: str | None, **context):
        self.context = {
            "date": time.strftime("%Y-%m-%d"),
            **context,
            "torch": torch.__version__,
            "hf_kbit": hf_kbit.__version__,
        }
        self.file = open(file, "a") if file else None
        print(", ".join(f"{key} {value}" for key, value in self.context.items()))

    def line(self, **entry) -> None:
        print(
            "  ".join(
                f"{key} {value:<9}" if isinstance(value, str) else f"{key} {value:>9.4g}"
                for key, value in entry.items()
            ),
            flush=True,
        )
        if self.file:
            print(json.dumps({**self.context, **entry}), file=self.file, flush=True)


def parse(parser, peers, uses=("plot",)) -> argparse.Namespace:
    """The command line of a benchmark that measures, beside ``peers``, on a GPU, or takes what it measured before, for
    one of the arguments that are named in ``uses``."""
    parser.add_argument("--peers", default=",".join(peers), help="default %(default)s; '' for none")
    parser.add_argument("--json", help="file to append a JSON line for each measurement to")
    if "plot" in uses:
        parser.add_argument("--plot", help="PNG to draw")
    parser.add_argument("--from", dest="source", help="measure nothing; take this file of JSON lines")
    arguments = parser.parse_args()
    if arguments.source and not any(getattr(arguments, use) for use in uses):
        parser.error(f"--from needs {' or '.join(f'--{use}' for use in uses)}")
    if not arguments.source and not torch.cuda.is_available():
        parser.error("no CUDA device; without one only what was measured can be looked at, by --from")
    arguments.peers = [peer for peer in arguments.peers.split(",") if peer]
    if unknown := set(arguments.peers) - set(peers):
        parser.error(f"--peers: found {', '.join(unknown)}, expected {', '.join(peers)}")
    return arguments


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def gpu_and_command() -> dict[str, str]:
    """Of a report: what it was measured on, and how to measure it again."""
    if not torch.cuda.is_available():
        return {"gpu": "none"}
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "cuda": torch.version.cuda,
        "command": shlex.join(["python", *sys.argv]),
    }


RENAMED = {"hf_kbit.decode": "hf_kbit.fast_generate"}  # modes of stored lines


def read(file: str) -> list[dict]:
    """JSON lines that a benchmark left, with today's names of modes."""
    with open(file) as lines:
        found = [json.loads(line) for line in lines]
    return [line | {"mode": RENAMED.get(line["mode"], line["mode"])} if "mode" in line else line for line in found]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table, with numbers in all columns but the first."""
    marks = "|---|" + "---:|" * (len(head) - 1)
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], marks, *lines[1:], ""])


def run_and_plot(arguments, run, plot) -> list[dict]:
    """``run(arguments)`` gives lines, unless ``--from`` has them; ``plot(lines, file)`` draws them, if asked to."""
    lines = read(arguments.source) if arguments.source else run(arguments)
    if arguments.plot:
        plot(lines, arguments.plot)
    return lines


def capture(calls):
    """A CUDA graph of ``calls``, each with inputs of its own, and their outputs, which live as long as it is used."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    return graph, kept


def graph_us(calls, budget_ms: float = 30) -> float:
    """Microseconds of one call: the median of replays of a graph, 5 to 50 of them, for about ``budget_ms``.

    They queue up behind each other, so the time to launch a graph is not in it.
    """
    return in_turns_us({None: calls}, budget_ms, rounds=1)[None]


def in_turns_us(sides: dict, budget_ms: float = 30, rounds: int = 4, failed=None) -> dict:
    """``graph_us`` of several sides, lists of calls by name, which take turns: so none of them alone has a GPU that is
    still cool, or already hot. Where one raises and there is ``failed(name, error)``, it is called, and the others are
    measured."""
    graphs = {}
    for name, calls in sides.items():
        try:
            graphs[name] = (*capture(calls), len(calls))
        except Exception as error:
            if failed is None:
                raise
            failed(name, error)
    counts = {}
    for name, (graph, *_) in graphs.items():
        graph.replay()
        counts[name] = math.ceil(min(50, max(5, budget_ms / replays_ms(graph, 1)[0])) / rounds)
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, (graph, *_) in graphs.items():
            times[name] += replays_ms(graph, counts[name])
    return {name: statistics.median(times[name]) * 1e3 / calls for name, (_, _, calls) in graphs.items()}


def replays_ms(graph, count: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def read_kernel():
    """A function ``(source, sink)`` that reads all of ``source``, int32, by a Triton kernel."""
    import triton
    import triton.language as tl

    @triton.jit
    def read(source, sink, size, BLOCK: tl.constexpr):
        total = tl.zeros((BLOCK,), dtype=tl.int32)
        for part in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
            places = part + tl.arange(0, BLOCK)
            total ^= tl.load(source + places, mask=places < size, other=0)
        if tl.sum(total) == 0x12345678:  # keeps the loads; never true but by chance
            tl.store(sink, 1)

    processors = torch.cuda.get_device_properties(0).multi_processor_count

    def run(source, sink, per_processor=8, block=2048, warps=8):
        read[(processors * per_processor,)](source, sink, source.numel(), BLOCK=block, num_warps=warps)

    return run
