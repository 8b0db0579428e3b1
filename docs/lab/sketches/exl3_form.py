"""EXL3's stored weights, decoded in plain PyTorch bit for bit:

    python docs/lab/sketches/exl3_form.py                          # random tensors beside a second decoder, in loops
    python docs/lab/sketches/exl3_form.py numbers.safetensors      # beside what exllamav3 itself made of its tensors
    python docs/lab/sketches/exl3_form.py FOLDER                   # every layer of a checkpoint: sides, widths, code

``docs/lab/2026-11-28-exl3-form.md`` says the form in words. It was read in exllamav3 1.4.1 (MIT).
"""

import hashlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

# Of a tile's weight t = 8 lane + j: its row (of the in_features) and its column (of the out_features).
LANE, PLACE = torch.arange(256) // 8, torch.arange(256) % 8
ROW = LANE % 4 * 2 + torch.tensor([0, 1, 8, 9])[PLACE % 4]
COLUMN = LANE // 4 + PLACE // 4 * 8


def windows(trellis: torch.Tensor) -> torch.Tensor:
    """int32 ``[k / 16, n / 16, 256]``: of each weight the 16 bits that end with its own, from ``[.., .., 16 K]``."""
    bits = trellis.shape[-1] // 16
    halves = (trellis.int() & 0xFFFF).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)  # the file swaps a word's halves
    stream = (halves[..., None] >> torch.arange(15, -1, -1) & 1).flatten(-2)  # the highest bit first
    end = (torch.arange(256) + 1) * bits
    window = stream[..., (end[:, None] + torch.arange(-16, 0)) % (256 * bits)]  # around the tile's end
    return (window << torch.arange(15, -1, -1)).sum(-1, dtype=torch.int32)


def pack(windows: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse: int16 ``[k / 16, n / 16, 16 bits]`` of windows whose last ``bits`` bits are each weight's own."""
    stream = (windows[..., None] >> torch.arange(bits - 1, -1, -1) & 1).flatten(-2)
    halves = (stream.unflatten(-1, (-1, 16)) << torch.arange(15, -1, -1)).sum(-1)
    return halves.unflatten(-1, (-1, 2)).flip(-1).flatten(-2).to(torch.int16)


def values(window: torch.Tensor, code: str) -> torch.Tensor:
    """float16 of the same shape. Sums are exact in float32, so they are rounded once, as on a GPU."""
    factor, add = {"3inst": (89226354, 64248484), "mcg": (0xCBAC1FED, 0), "mul1": (0x83DCD12D, 0)}[code]
    x = (window.long() * factor + add) & 0xFFFFFFFF
    if code == "mul1":
        total = sum(x >> shift & 255 for shift in (0, 8, 16, 24))
        scale, shift = torch.tensor([0x1EEE, 0xC931 - 0x10000], dtype=torch.int16).view(torch.float16).float()
        return ((1024 + total).float() * scale + shift).half()
    x = x & 0x8FFF8FFF ^ 0x3B603B60
    low, high = ((x >> shift & 0xFFFF).to(torch.uint16).view(torch.float16).float() for shift in (0, 16))
    return (low + high).half()


def inner(trellis: torch.Tensor, code: str) -> torch.Tensor:
    """float16 ``[k, n]``: the weight between the transforms."""
    tiles = torch.empty(*trellis.shape[:2], 16, 16, dtype=torch.float16)
    tiles[..., ROW, COLUMN] = values(windows(trellis), code)
    return tiles.transpose(1, 2).flatten(2).flatten(0, 1)


def signs(packed: torch.Tensor) -> torch.Tensor:
    """float16: old files pack 16 signs into an int16, the first into the lowest bit; a one is a minus."""
    return (1 - 2 * (packed.int()[:, None] >> torch.arange(16) & 1)).half().flatten()


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """``x`` times Sylvester's matrix of 128 over sqrt(128), in blocks along the last dimension."""
    y, shape = x.unflatten(-1, (-1, 128)), x.shape
    for half in (1, 2, 4, 8, 16, 32, 64):
        pairs = y.unflatten(-1, (-1, 2, half))
        y = torch.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).flatten(-3)
    return (y / math.sqrt(128)).reshape(shape)


def scales(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(tensors[f"s{side}h"] if f"s{side}h" in tensors else signs(tensors[f"s{side}"]) for side in "uv")


def code_of(tensors: dict[str, torch.Tensor]) -> str:
    return next((code for code in ("mul1", "mcg") if code in tensors), "3inst")


def dense(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """float64 ``[k, n]``: the weight itself, so that y = x @ dense + bias."""
    on_inputs, on_outputs = (scale.double() for scale in scales(tensors))
    weight = hadamard(inner(tensors["trellis"], code_of(tensors)).double())
    return on_inputs[:, None] * hadamard(weight.T).T * on_outputs


def in_loops(trellis: np.ndarray, code: str) -> np.ndarray:
    """What ``inner`` returns, by a second reading of the form: a tile's stream as one number, weight by weight."""
    bits, (rows, columns) = trellis.shape[-1] // 16, trellis.shape[:2]
    out = np.zeros((16 * rows, 16 * columns), np.float16)
    for i, j in np.ndindex(rows, columns):
        words = trellis[i, j].astype(np.uint16)
        stream = int("".join(f"{words[w ^ 1]:016b}" for w in range(len(words))), 2)
        length = 256 * bits
        for t in range(256):
            left = (length - (t + 1) * bits) % length
            w = ((stream >> left) | (stream << (length - left))) & 0xFFFF
            lane, place = divmod(t, 8)
            row, column = 2 * (lane % 4) + (place & 1) + 4 * (place & 2), lane // 4 + (8 if place & 4 else 0)
            out[16 * i + row, 16 * j + column] = one_value(w, code)
    return out


def one_value(w: int, code: str) -> np.float16:
    if code == "mul1":
        total = sum((w * 0x83DCD12D % 2**32).to_bytes(4, "little"))
        return np.float16((1024 + total) * (1774 / 2**18) - 1329 / 2**7)
    x = (w * 89226354 + 64248484) % 2**32 if code == "3inst" else w * 0xCBAC1FED % 2**32
    low, high = np.array([x & 0x8FFF8FFF ^ 0x3B603B60], np.uint32).view(np.float16).astype(np.float64)
    return np.float16(low + high)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def check_loops() -> None:
    for code in ("3inst", "mcg", "mul1"):
        every = values(torch.arange(65536), code)
        assert np.array_equal(every.numpy(), np.array([one_value(w, code) for w in range(65536)])), code
        print(f"{code}: standard deviation {every.double().std():.4f}, from {every.min():.4f} to {every.max():.4f}")
        for bits in range(1, 9):
            trellis = torch.randint(-(2**15), 2**15, (2, 3, 16 * bits), dtype=torch.int16)
            assert np.array_equal(inner(trellis, code).numpy(), in_loops(trellis.numpy(), code)), (code, bits)
            assert torch.equal(pack(windows(trellis), bits), trellis), (code, bits)
    identity = torch.eye(128, dtype=torch.float64)
    assert torch.allclose(hadamard(hadamard(identity)), identity)
    print("all windows of three codes, and tiles of 1 to 8 bits, equal those of the loops")


def check_numbers(path: str) -> None:
    """``{name}.trellis, suh, svh, x, y`` beside a digest of exllamav3's reconstruction, and digests of its codes."""
    wrong = 0
    with safe_open(path, "pt") as file:
        digests, names = json.loads(file.metadata()["digests"]), sorted(file.keys())
        for code in ("3inst", "mcg", "mul1"):
            if f"{code}.values" in digests:
                equal = digests[f"{code}.values"] == digest(values(torch.arange(65536), code))
                wrong += not equal
                print(f"{code}: all windows {'equal' if equal else 'DIFFER'}")
        for name in (key.removesuffix(".trellis") for key in names if key.endswith(".trellis")):
            tensors = {
                key.removeprefix(f"{name}."): file.get_tensor(key) for key in names if key.startswith(f"{name}.")
            }
            weight = inner(tensors["trellis"], code_of(tensors))
            equal = digests[name] == digest(weight)
            exact = tensors["x"].double() @ dense(tensors)
            error = (tensors["y"].double() - exact).norm() / exact.norm()
            wrong += not equal or not error < 2e-3
            print(f"{name} {list(weight.shape)}: {'equal' if equal else 'DIFFERS'}, outputs off by {error:.1e}")
    print("all equal" if not wrong else f"{wrong} WRONG")


def describe(folder: Path) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = sorted(file.keys())
            for name in (key.removesuffix(".trellis") for key in names if key.endswith(".trellis")):
                tensors = {k.removeprefix(f"{name}."): file.get_tensor(k) for k in names if k.startswith(f"{name}.")}
                k, n, words = tensors["trellis"].shape
                weight = dense(tensors)
                print(f"{name}: {16 * k} x {16 * n}, {words // 16} bits, {code_of(tensors)}, rms {weight.std():.4f}")


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else None
    if given is None:
        check_loops()
    elif Path(given).is_dir():
        describe(Path(given))
    else:
        check_numbers(given)
