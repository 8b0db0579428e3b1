"""Registers, spills, stack and static shared memory of every CUDA kernel, as ``ptxas`` reports them, against
``resources.json``; and which registers the tensor cores still read when they are written.

    python tests/csrc/test_resources.py   # checks all, and records anew, with the nvcc that is found first

Compiling takes ten minutes of two cores, and its result follows from the sources: where the record is of these very
sources and this nvcc, nothing is compiled. The shared memory that gemm is launched with is no part of it:
``plan_gemm`` computes that.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("resources.json")
ARCHS = ("75", "80", "86", "89", "90a", "100", "120")  # those of a release
FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Werror", "all-warnings")  # those of csrc/CMakeLists.txt
AGAIN = "if that is meant, record anew with: python tests/csrc/test_resources.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed"),
    pytest.mark.skipif(not shutil.which("c++filt"), reason="c++filt is not installed"),
    pytest.mark.skipif(not (ROOT / "csrc/kernels").is_dir(), reason="the source tree is not there"),
]


def run(*command) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout


def nvcc_version() -> str:
    return re.search(r"\bV([\d.]+)", run("nvcc", "--version"))[1]


def hash_of_sources() -> str:
    """A hash of all that is compiled, and how."""
    found = hashlib.sha256(repr((ARCHS, FLAGS)).encode())
    for folder in ("common", "kernels"):
        for file in sorted((ROOT / "csrc" / folder).iterdir()):
            found.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return found.hexdigest()


def disassembled(cubin: str) -> str:
    """By the tool of a package of its own: not every nvcc comes with it."""
    tool = next(file for file in importlib.metadata.files("nvidia-cuda-nvdisasm") if file.name == "nvdisasm")
    return run(tool.locate(), "-c", cubin)


def compile_all(disassemble: dict | None = None) -> dict:
    """Of every file and architecture that nvcc knows: its exit status and all it printed. ``disassemble`` gets the
    instructions of files that use wgmma."""
    known = run("nvcc", "--list-gpu-code").split()
    archs = [arch for arch in ARCHS if f"sm_{arch.rstrip('a')}" in known]
    files = sorted(ROOT.glob("csrc/kernels/*.cu"), key=lambda file: -file.stat().st_size)  # the longest first
    jobs = [(file.name, arch) for file in files for arch in archs]

    def compile_one(job):
        file, arch = job
        command = ["nvcc", "-cubin", f"-arch=sm_{arch}", *FLAGS, "-Icsrc", "-Xptxas", "-v", f"csrc/kernels/{file}"]
        command += ["-o", f"{folder}/{file}.{arch}.cubin"]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        if disassemble is not None and arch == "90a" and file.endswith("_wgmma.cu") and ran.returncode == 0:
            disassemble[file] = disassembled(command[-1])
        return ran.returncode, ran.stdout + ran.stderr

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(jobs, pool.map(compile_one, jobs), strict=True))


def short_names(mangled: list[str]) -> list[str]:
    """As in the source, without namespaces and parameters: ``gemm_kernel<4, half, 1, 16>``."""
    names = []
    for name in run("c++filt", *mangled).splitlines():
        name = re.sub(r"^void |\(anonymous namespace\)::|\w+::", "", name)
        names.append(re.sub(r"(?<![<, ])\(.*", "", name).replace("__nv_", "").replace("__half", "half"))
    return names


def resources(printed: str) -> dict:
    """``ptxas -v``'s report: a kernel's short name to what it takes."""
    parts = re.split(r"Compiling entry function '(\w+)' for", printed)
    found = {}
    for name, report in zip(short_names(parts[1::2]), parts[2::2], strict=True):

        def number(pattern, report=report):
            return sum(int(count) for count in re.findall(pattern, report))

        assert name not in found and "Used " in report, f"{name}: {report}"
        found[name] = {
            "registers": number(r"Used (\d+) registers"),
            "shared": number(r"(\d+) bytes smem"),
            "spill": number(r"(\d+) bytes spill"),  # stores and loads
            "stack": number(r"(\d+) bytes stack frame"),
        }
    assert found, f"ptxas reported no kernel: {printed}"
    return found


def by_kernel(compiled: dict) -> dict:
    """Kernel to architecture to what it takes there."""
    table = {}
    for (file, arch), (status, printed) in compiled.items():
        assert status == 0, f"{file} for sm_{arch}: {printed}"
        for name, found in resources(printed).items():
            assert arch not in table.setdefault(name, {}), f"{name} is in {file} and in another file"
            table[name][arch] = found
    return table


def dumps(nvcc: str, sources: str, table: dict) -> str:
    """One kernel in a line: a number for every architecture, or one where they have the same."""
    for name, archs in table.items():
        assert tuple(archs) == ARCHS, f"{name}: found for {', '.join(archs)}, expected for {', '.join(ARCHS)}"
    lines = []
    for name, archs in sorted(table.items()):
        entry = {}
        for what in ("registers", "shared", "spill", "stack"):
            numbers = [archs[arch][what] for arch in ARCHS]
            entry[what] = numbers if len(set(numbers)) > 1 else numbers[0]
        lines.append(f"    {json.dumps(name)}: {json.dumps(entry)}")
    kernels = ",\n".join(lines)
    head = f'  "nvcc": {json.dumps(nvcc)},\n  "sources": {json.dumps(sources)},\n  "archs": {json.dumps(ARCHS)},\n'
    return f'{{\n{head}  "kernels": {{\n{kernels}\n  }}\n}}\n'


def recorded_by_kernel(record: dict) -> dict:
    def of_arch(entry, i):
        return {what: numbers[i] if isinstance(numbers, list) else numbers for what, numbers in entry.items()}

    return {
        name: {arch: of_arch(entry, i) for i, arch in enumerate(record["archs"])}
        for name, entry in record["kernels"].items()
    }


@pytest.fixture(scope="module")
def instructions():
    """Of files that use wgmma, once ``compiled`` is there."""
    return {}


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text())


@pytest.fixture(scope="module")
def up_to_date(record):
    return (record["nvcc"], record["sources"]) == (nvcc_version(), hash_of_sources())


@pytest.fixture(scope="module")
def compiled(up_to_date, instructions):
    if up_to_date:
        pytest.skip("resources.json is of these very sources and this nvcc")
    return compile_all(instructions)


@pytest.fixture(scope="module")
def table(request, record, up_to_date):
    return recorded_by_kernel(record) if up_to_date else by_kernel(request.getfixturevalue("compiled"))


def test_no_warnings(compiled):
    """A warning is an error to nvcc and its host compiler; what ptxas says is searched too."""
    complaints = {
        f"{file} for sm_{arch}": printed
        for (file, arch), (status, printed) in compiled.items()
        if status or re.search(r"\b(warning|error|performance loss)\b", printed, re.IGNORECASE)
    }
    assert not complaints, "\n".join(f"{job}:\n{printed}" for job, printed in complaints.items())


# Bytes of stack of a thread, in instances for 9 to 16 tokens: counters, outside the loop over row tiles.
STACK = {
    f"gemm_kernel<{bits}, {dtype}, 2, 16, {transformed}, false>": 8
    for bits, transformed in ((2, "true"), (3, "false"), (3, "true"), (4, "true"), (5, "false"))
    for dtype in ("half", "bfloat16")
}


def test_gemm_keeps_all_in_registers(table):
    """Its launch bounds leave hardly a register unused, so that a small change, or a new compiler, may spill."""
    gemm = {name: archs for name, archs in table.items() if re.match("(gemm|[a-z]+_wgmma)_kernel<", name)}
    assert len(gemm) == 174, "expected 80 of gemm_kernel, 46, 40 and 8 of those of gemm, experts and gradient_wgmma"
    leaks = [
        f"{name} for sm_{arch}: {found}"
        for name, archs in gemm.items()
        for arch, found in archs.items()
        if found["stack"] > STACK.get(name, 0) or (found["spill"] and name not in STACK)
    ]
    assert not leaks, "\n".join(leaks)


def overwritten(listing: str) -> list[str]:
    """Instructions of a kernel that write a register of operand A of a group of wgmma before that group is waited for.

    The compiler gives operands of two pieces registers of their own where it sees both; not where they are the same
    variables in two turns of a loop. The loop around the products is gone through twice.
    """
    found, at = [], {}
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            at[label[1]] = len(found)
        elif instruction := re.match(r"\s+/\*(\w+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?) *;", line):
            found.append(instruction.groups())
    products = [i for i, (_, name, _) in enumerate(found) if name.startswith("HGMMA")]
    back = (  # where a branch behind the last product leads before the first
        (at[label[1]], i)
        for i, (_, name, rest) in enumerate(found)
        if i > products[-1] and name == "BRA" and (label := re.search(r"\((\.L_x_\d+)\)", rest))
    )
    first, last = next((to, i) for to, i in back if to < products[0])
    begun, groups, written = set(), [], []
    for address, name, rest in 2 * found[first : last + 1]:
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", rest)]
        if name.startswith("HGMMA"):
            begun |= set(range(registers[1], registers[1] + 4))
            if "gsb0" in rest:
                groups.append(begun)
                begun = set()
        elif name.startswith("WARPGROUP.DEPBAR"):
            left = int(rest.split(",")[1], 16)
            groups = groups[len(groups) - min(left, len(groups)) :]
        elif re.match(r"R\d+\b", rest) and not name.startswith(("ST", "SYNCS", "BAR", "R2UR", "UTMA")):
            width = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
            if set(range(registers[0], registers[0] + width)) & set().union(begun, *groups):
                written.append(f"{address} {name} {rest}")
    return written


LOOP = """
.L_x_1:
        /*0100*/                   LDS R{first}, [R9+0x400] ;
        /*0110*/                   HGMMA.64x256x16.F32.BF16 R24, R152, gdesc[UR20], R24, gsb0 ;
        /*0120*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0130*/                   LDS R{second}, [R9+0x400] ;
        /*0140*/                   HGMMA.64x256x16.F32.BF16 R24, R168, gdesc[UR20], R24, gsb0 ;
        /*0150*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0160*/              @!P2 BRA `(.L_x_1) ;
"""


def test_overwritten_operands_are_found():
    """A group is done once the one behind it is waited for but for itself."""
    assert overwritten(LOOP.format(first=152, second=168)) == []
    assert [line.split()[0] for line in overwritten(LOOP.format(first=152, second=153))] == ["0130", "0130"]
    assert [line.split()[0] for line in overwritten(LOOP.format(first=170, second=168))] == ["0100"]


def test_operands_of_wgmma_stay_until_it_is_done(compiled, instructions):
    kernels = {}
    for listing in instructions.values():
        parts = re.split(r"^\.text\.(\w+):", listing, flags=re.MULTILINE)
        kernels |= {name: part for name, part in zip(parts[1::2], parts[2::2], strict=True) if "HGMMA" in part}
    assert len(kernels) == 94, "expected 46, 40 and 8 of those of gemm, experts and gradient_wgmma"
    faults = {name: wrong for name, part in kernels.items() if (wrong := overwritten(part))}
    assert not faults, "\n".join(f"{short_names([name])[0]}: {wrong}" for name, wrong in faults.items())


def test_as_recorded(record, compiled):
    if (version := nvcc_version()) != record["nvcc"]:
        pytest.skip(f"recorded with nvcc {record['nvcc']}, found {version}")
    table, expected = by_kernel(compiled), recorded_by_kernel(record)
    changes = [
        f"{name} for sm_{arch}: found {found}, expected {known}"
        for name in sorted(table.keys() | expected.keys())
        for arch in ARCHS
        if (found := table.get(name, {}).get(arch)) != (known := expected.get(name, {}).get(arch))
    ]
    assert not changes, "\n".join([*changes, AGAIN])


def test_record_is_as_written(record):
    """Edited by hand or merged, it would change with the next recording."""
    assert tuple(record["archs"]) == ARCHS, AGAIN
    assert RECORD.read_text() == dumps(record["nvcc"], record["sources"], recorded_by_kernel(record)), AGAIN


def write_record() -> None:
    listings = {}
    compilation = compile_all(listings)
    test_no_warnings(compilation)
    test_operands_of_wgmma_stay_until_it_is_done(compilation, listings)
    kernels = by_kernel(compilation)
    test_gemm_keeps_all_in_registers(kernels)
    RECORD.write_text(dumps(nvcc_version(), hash_of_sources(), kernels))
    print(f"wrote {RECORD}")


if __name__ == "__main__":
    write_record()
