"""Whether a kernel's machine code writes to registers that a `wgmma` under way may still read as its operand A.

    python docs/lab/sketches/wgmma_operands.py libmany.so [cuobjdump]

For loops whose groups of `wgmma` are followed by a wait for all but the last one (or for all). ptxas serialises such
code where it sees it (C7513); with a branch between it has been silent, and results were wrong. Looks at innermost
loops with a `wgmma`, twice around; groups in the code before and behind them are not followed.
"""

import re
import subprocess
import sys

MNEMONIC = re.compile(r"(?:@!?\S+\s+)?(\S+)\s+R(\d+)")
NO_TARGET = re.compile(r"ST|SYNCS|RED|BRA|BAR|FENCE|UTMA|ATOMS|.*GMMA")


def functions(path, tool):
    text = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True).stdout
    for part in re.split(r"Function : ", text)[1:]:
        found = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", part)
        yield part.split("\n")[0], [(int(address, 16), code.strip()) for address, code in found]


def loops(lines):
    """Innermost ones with a wgmma: first and last line."""
    place = {address: i for i, (address, _) in enumerate(lines)}
    found = []
    for i, (address, code) in enumerate(lines):
        target = re.search(r"BRA\S* .*?(0x[0-9a-f]+)", code)
        if target and int(target[1], 16) < address and int(target[1], 16) in place:
            first = place[int(target[1], 16)]
            if any("GMMA" in code for _, code in lines[first : i + 1]):
                found.append((first, i))
    return [a for a in found if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in found)]


def writes(body):
    """Of each operand A: what is written to it before the wait that its group has ended."""
    twice = [code for _, code in body] * 2
    for i, code in enumerate(twice[: len(body)]):
        operand = re.search(r"GMMA\S+ R\d+, R(\d+), gdesc", code)
        if not operand:
            continue
        registers, waits = range(int(operand[1]), int(operand[1]) + 4), 0
        for later in twice[i + 1 :]:
            wait = re.search(r"DEPBAR.LE gsb0, (0x\d+)", later)
            waits += wait is not None
            if waits == 2 or (wait and int(wait[1], 16) == 0):
                break
            target = MNEMONIC.match(later)
            if target and not NO_TARGET.match(target[1]):
                width = 4 if ".128" in target[1] else 2 if ".64" in target[1] else 1
                if any(r in registers for r in range(int(target[2]), int(target[2]) + width)):
                    yield code, later


if __name__ == "__main__":
    wrong = 0
    for name, lines in functions(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cuobjdump"):
        for first, last in loops(lines):
            body = lines[first : last + 1]
            found = list(writes(body))
            wrong += len(found)
            print(name, f"{sum('GMMA' in code for _, code in body)} wgmma, {len(found)} writes", *found[:1])
    sys.exit(wrong > 0)
