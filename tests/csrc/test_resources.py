"""Of the CUDA library that was built: no kernel spills registers, or writes one that the tensor cores still read.

Both have gone wrong before, neither of them in a way that results always show.
"""

import re
import subprocess
from pathlib import Path

import pytest

import hf_kbit

LIBRARY = Path(hf_kbit.__file__).with_name("libhf_kbit_cuda.so")
PRODUCTS = "HGMMA", "IGMMA"
# Bytes of some kernels: of counters outside the loop over row tiles, for 9 to 16 tokens; while groups of warps
# exchange sums, of trellises with 128 tokens of int8; of where a weight lies, once in each step of 64 inputs.
MOST_STACK = {
    r"gemm_kernelILi\dE(6__half|13__nv_bfloat16)Li2ELi16E": 8,
    r"multiply_many_kernelILi\dE\w+aLi128E": 8,
    r"multiply_trellis_kernelILi[78]ELi1E": 16,
}


def cuobjdump(option: str) -> str:
    nvidia = pytest.importorskip("triton.backends.nvidia")
    if not LIBRARY.exists():
        pytest.skip("the CUDA library was not built")
    command = [Path(nvidia.__file__).parent / "bin" / "cuobjdump", option, LIBRARY]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


@pytest.mark.slow
def test_all_is_kept_in_registers():
    """Launch bounds leave hardly a register unused, so that a small change, or a new compiler, may spill."""
    printed = cuobjdump("--dump-resource-usage")
    stacks = {name: int(size) for name, size in re.findall(r"Function (\w+):\s+REG:\d+ STACK:(\d+)", printed)}
    assert len(stacks) > 300

    def most(name: str) -> int:
        return max((size for part, size in MOST_STACK.items() if re.search(part, name)), default=0)

    assert not [f"{name}: {size}" for name, size in stacks.items() if size > most(name)]


def overwritten(listing: str) -> list[str]:
    """Instructions of a kernel that write a register of operand A of a group of wgmma before that group is waited for.

    The compiler gives operands of two pieces registers of their own where it sees both; not where they are the same
    variables in two turns of a loop. The loop around the products is gone through twice.
    """
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?) *;", listing)
    at = {int(address, 16): i for i, (address, _, _) in enumerate(found)}
    products = [i for i, (_, name, _) in enumerate(found) if name.startswith(PRODUCTS)]
    back = (  # where a branch behind the last product leads before the first
        (at[int(target[0], 16)], i)
        for i, (_, name, rest) in enumerate(found)
        if i > products[-1] and name == "BRA" and (target := re.findall(r"0x([0-9a-f]+)$", rest))
    )
    first, last = next((to, i) for to, i in back if to < products[0])
    begun, groups, written = set(), [], []
    for address, name, rest in 2 * found[first : last + 1]:
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", rest)]
        if name.startswith(PRODUCTS):
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
        /*0100*/                   LDS R{first}, [R9+0x400] ;
        /*0110*/                   HGMMA.64x256x16.F32.BF16 R24, R152, gdesc[UR20], R24, gsb0 ;
        /*0120*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0130*/                   LDS R{second}, [R9+0x400] ;
        /*0140*/                   HGMMA.64x256x16.F32.BF16 R24, R168, gdesc[UR20], R24, gsb0 ;
        /*0150*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0160*/              @!P2 BRA 0x100 ;
"""


def test_overwritten_operands_are_found():
    """A group is done once the one behind it is waited for but for itself."""
    assert overwritten(LOOP.format(first=152, second=168)) == []
    assert [line.split()[0] for line in overwritten(LOOP.format(first=152, second=153))] == ["0130", "0130"]
    assert [line.split()[0] for line in overwritten(LOOP.format(first=170, second=168))] == ["0100"]


@pytest.mark.slow
def test_operands_of_wgmma_stay_until_it_is_done():
    parts = re.split(r"^\s+Function : (\w+)", cuobjdump("-sass"), flags=re.MULTILINE)
    kernels = {name: part for name, part in zip(parts[1::2], parts[2::2], strict=True) if re.search("[HI]GMMA", part)}
    if not kernels:
        pytest.skip("the CUDA library has no code for Hopper")
    assert len(kernels) == 332, (
        "expected 92, 40 and 8 of gemm, experts and gradient_wgmma, 40 and 20 of int8, 128 and 4 of trellises"
    )
    faults = {name: wrong for name, part in kernels.items() if (wrong := overwritten(part))}
    assert not faults, "\n".join(f"{name}: {wrong}" for name, wrong in faults.items())
