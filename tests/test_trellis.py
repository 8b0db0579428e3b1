"""EXL3's form: beside what exllamav3 itself has made and rebuilt, and beside a second reading in loops."""

import hashlib
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from contract import gaussian_tiles, trellis_halfway
from safetensors import safe_open

from hf_kbit.format import trellis as form
from hf_kbit.format.trellis import BITS, CODES, decode, encode, inner, pack, rotate, values, windows

NUMBERS = Path(__file__).parent / "data/exl3/numbers.safetensors"
with safe_open(NUMBERS, "pt") as file:
    DIGESTS, KEYS = json.loads(file.metadata()["digests"]), sorted(file.keys())
LAYERS = [key.removesuffix(".trellis") for key in KEYS if key.endswith(".trellis")]


def tensors_of(layer: str) -> dict[str, torch.Tensor]:
    with safe_open(NUMBERS, "pt") as file:
        return {key.removeprefix(f"{layer}."): file.get_tensor(key) for key in KEYS if key.startswith(f"{layer}.")}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def random_trellis(bits: int, down: int = 2, across: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(-(2**15), 2**15, (down, across, 16 * bits), generator=generator).to(torch.int16)


@pytest.mark.parametrize("layer", LAYERS)
def test_what_exllamav3_has_rebuilt(layer):
    """Of matrices that it made, of 1 to 8 bits, by three codes, with scales and with old packed signs."""
    tensors = tensors_of(layer)
    weight = inner(tensors["trellis"], form.code_of(tensors))
    assert digest(weight.T) == DIGESTS[layer]
    exact = tensors["x"].double() @ decode(tensors, torch.float64).T
    assert (tensors["y"].double() - exact).norm() < 2e-3 * exact.norm(), "float16's rounding"
    torch.testing.assert_close(decode(tensors).double(), decode(tensors, torch.float64), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("code", CODES)
def test_all_values_are_those_of_exllamav3(code):
    assert digest(values(torch.arange(1 << form.WINDOW), code)) == DIGESTS[f"{code}.values"]


def in_loops(trellis: np.ndarray, code: str) -> np.ndarray:
    """``[K, N]``, by a second reading of the form: a tile's stream as one number, weight by weight."""
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


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bits", BITS)
def test_as_in_loops(bits, code, monkeypatch):
    """Also where only some tiles are decoded at a time; packing is the way back."""
    trellis = random_trellis(bits)
    expected = in_loops(trellis.numpy(), code)
    for at_a_time in (form.AT_A_TIME, 3):
        monkeypatch.setattr(form, "AT_A_TIME", at_a_time)
        assert np.array_equal(inner(trellis, code).T.numpy(), expected)
    assert torch.equal(pack(windows(trellis), bits), trellis)
    assert torch.equal(inner(trellis, code, torch.float32), torch.from_numpy(expected).T.float())


def encoded_in_loops(targets: np.ndarray, bits: int, lead: int) -> list[int]:
    """Windows of one tile, by the costs of all states as integers, and the branches that led to them."""
    factor, quantum = (4, 4, 4, 8, 16, 16, 16, 16)[bits - 1], (2, 2, 4, 4, 8, 8, 1, 1)[bits - 1]
    reached = [sum((w * 0x83DCD12D % 2**32).to_bytes(4, "little")) * factor for w in range(2**16)]
    reached, kept = np.array(reached, np.int64).reshape(2**bits, -1), 16 - bits
    units = []
    for x in targets:  # float32's product and sum, then exact numbers
        exact = Fraction(float(np.float32(x * np.float32(2**18 / 1774)) + np.float32(1329 * 2**11 / 1774 - 1024)))
        units.append(min(max(round(exact * factor / quantum) * quantum, 0), 1020 * factor))
    taken = np.zeros((256, 2**kept), int)
    before = np.arange(2**16).reshape(2**bits, -1) >> bits

    def step(costs: np.ndarray, t: int) -> np.ndarray:
        new = costs[before] + (reached - units[t]) ** 2
        taken[t] = new.argmin(0)  # the first one
        return new.min(0)

    costs = np.zeros(2**kept, np.int64)
    for t in [*range(256 - lead, 256), *range(lead)]:
        costs = step(costs, t)
    joint = int(costs.argmin())
    for t in reversed(range(lead)):
        joint = (int(taken[t, joint]) << kept | joint) >> bits
    costs = np.full(2**kept, 2**50)
    costs[joint] = 0
    for t in range(256):
        costs = step(costs, t)
    state, found = joint, []
    for t in reversed(range(256)):
        found.append(int(taken[t, state]) << kept | state)
        state = found[-1] >> bits
    assert state == joint
    return found[::-1]


@pytest.mark.parametrize("bits", BITS)
def test_encoding_as_in_loops(bits):
    """Also numbers halfway between steps, and some that no window reaches."""
    targets = torch.cat([4 * gaussian_tiles(1), trellis_halfway(bits)])
    for tile, lead in zip(targets, (40, 7), strict=True):
        (found,) = windows(encode(tile[None], bits, lead)[None])[0]
        assert found.tolist() == encoded_in_loops(tile.numpy(), bits, lead)


def test_tiles_are_encoded_some_at_a_time(monkeypatch):
    targets = gaussian_tiles(5)
    found = encode(targets, 4, 5)
    monkeypatch.setattr(form, "WINDOWS_AT_A_TIME", 2**17)
    assert torch.equal(encode(targets, 4, 5), found)


def test_rotating_twice_is_nothing():
    x = torch.randn(3, 256, dtype=torch.float64)
    torch.testing.assert_close(rotate(rotate(x)), x)
    torch.testing.assert_close(rotate(x).norm(), x.norm())


def layer(bits: int = 2) -> dict[str, torch.Tensor]:
    return {"trellis": random_trellis(bits, 8, 16), "suh": torch.ones(128).half(), "svh": torch.ones(256).half()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trellis": None}, r"a\.trellis: found none, expected it among \['suh', 'svh'\]"),
        ({"trellis": random_trellis(2, 8, 16).int()}, r"a\.trellis: found dtype int32 and shape \[8, 16, 32\]"),
        ({"trellis": random_trellis(2, 8, 16)[..., :24]}, r"a\.trellis: found dtype int16 and shape \[8, 16, 24\]"),
        ({"trellis": random_trellis(2, 8, 16)[0]}, r"expected int16 \[K / 16, N / 16, 16 \* bits\] of 1 to 8 bits"),
        ({"trellis": random_trellis(9, 8, 16)}, r"shape \[8, 16, 144\], expected"),
        ({"trellis": random_trellis(2, 8, 9)}, r"a\.trellis: found a weight of 144 x 128, expected multiples of 128"),
        ({"suh": None}, r"a\.suh: found neither it nor su, expected one of them"),
        ({"suh": torch.ones(256).half()}, r"a\.suh: found float16 \[256\], expected float16 \[128\]"),
        ({"svh": torch.ones(256)}, r"a\.svh: found float32 \[256\], expected float16 \[256\]"),
        ({"svh": None, "sv": torch.ones(8).short()}, r"a\.sv: found int16 \[8\], expected int16 \[16\]"),
    ],
)
def test_what_is_no_layer_is_refused(change, message):
    tensors = {name: tensor for name, tensor in (layer() | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        decode(tensors, name="a")
