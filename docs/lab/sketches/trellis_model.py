"""A model whose weights are coded by the trellis of ``trellis.py``, beside today's codebooks, at equal stored bits.

``docs/lab/2026-11-26-trellis.md`` has the figures. To make them again, from the root of the repository:

    python docs/lab/sketches/trellis_model.py MODEL moments        # once: second moments of what the layers are given
    python docs/lab/sketches/trellis_model.py MODEL 2,6 --sweeps 1       # with feedback; `2,2`: today's codebook
    python docs/lab/sketches/trellis_model.py MODEL 2,6 --no-data        # and without

MODEL is a folder with a Llama or Qwen2, and ``calibration.safetensors`` and ``held_out.safetensors`` with ``tokens``.
Each run writes its divergence at each token into the folder ``--keep``; ``--against`` names a run to compare with.
"""

import argparse
import time
from pathlib import Path

import torch
from hf_kbit.balance import balance
from hf_kbit.packed import quantize_weight
from hf_kbit.reference import MAGNITUDE, decode_e4m4
from hf_kbit.transforms import of_moments, to_original, to_stored
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from trellis import error, named, signs, trained

from hf_kbit import codebooks, reference
from hf_kbit.calibration import feedback
from hf_kbit.calibration.moments import Moments, damping_of
from hf_kbit.calibration.rounding import _rounded

WINDOW = 2048
SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # layers that are given the same


# --- a block with feedback ------------------------------------------------------------------------


def feed_back(trellis, columns, root, start, end=None):
    """Codes a block ``[32, rows]`` so that the squared errors are least that are left when each column's error goes to
    those after it, as ``root`` says: each history has its own remainders. Returns decoded columns and the history."""
    sign, rows = signs(columns), columns.shape[1]
    around = trellis.scales(columns * sign, start, range(-6, 7, 4)).int()
    tried = (around + torch.tensor((-2, 0, 2))[:, None]).clamp(1, MAGNITUDE).to(torch.uint8)
    scale = (decode_e4m4(tried) * sign).flatten()
    repeated = [None if each is None else each.repeat(3) for each in (start, end)]
    costs, decoded, history = _survivors(trellis, columns.repeat(1, 3), root, scale, *repeated)
    best = costs.view(3, rows).argmin(0) * rows + torch.arange(rows)
    return decoded[:, best], history[best]


def _survivors(trellis, columns, root, scale, start, end):
    steps, chains = columns.shape
    left = columns[:, None].expand(steps, trellis.histories, chains)
    costs, kept = trellis.begin(chains, start), []
    values = (trellis.table[:, None] * scale).view(trellis.histories, -1, chains)
    for j in range(steps):
        errors = (left[0][:, None] - values) / root[j, j]
        candidates = trellis.by_next((errors.square() + costs[:, None]).flatten(0, 1))
        costs, branch = candidates[0], torch.zeros(trellis.histories, chains, dtype=torch.uint8)
        for number, others in enumerate(candidates[1:], start=1):  # many times as fast as min with its indices
            branch.masked_fill_(others < costs, number)
            costs = torch.minimum(others, costs)
        states = trellis.before.T.gather(1, branch.long())
        kept.append(states)
        errors, before = errors.flatten(0, 1).gather(0, states), states >> trellis.bits
        left = left[1:].gather(1, before.expand(steps - 1 - j, -1, -1))
        left.addcmul_(root[j, j + 1 :, None, None], errors[None], value=-1)
    history = last = costs.argmin(0) if end is None else end
    path = []
    for states in reversed(kept):
        path.append(states.gather(0, history[None])[0])
        history = path[-1] >> trellis.bits
    return costs.gather(0, last[None])[0], trellis.table[torch.stack(path[::-1])] * scale, last


# --- a layer --------------------------------------------------------------------------------------


def solve(trellis, weight, hessian, sweeps, within):
    """The decoded weight ``[N, K]``: ``feedback.solve`` with a chain along each row, block after block in descending
    order of their moments; in sweeps a block keeps the histories that it begins and ends with. Without ``within``
    errors go to later blocks alone."""
    blocks = hessian.diagonal().view(-1, 32).sum(1).sort(descending=True, stable=True).indices
    order = (32 * blocks[:, None] + torch.arange(32)).flatten()
    columns, hessian, damping = weight.T[order], hessian[order][:, order], damping_of(hessian, feedback.DAMPING)
    target, root, decoded = columns.clone(), feedback._inverse_root(hessian, damping), torch.empty_like(columns)
    history = torch.zeros(len(weight), dtype=torch.int64)
    histories, parts = [history], [slice(start, start + 32) for start in range(0, len(columns), 32)]
    for own in parts:
        inner = root[own, own] if within else torch.eye(32)
        decoded[own], history = feed_back(trellis, columns[own], inner, history)
        errors = torch.linalg.solve_triangular(root[own, own].T, columns[own] - decoded[own], upper=False)
        columns[own.stop :] -= root[own, own.stop :].T @ errors
        histories.append(history)
    hessian.diagonal().add_(damping)
    gradient, histories[-1] = hessian @ (decoded - target), None
    for _ in range(sweeps):
        for own, start, end in zip(parts, histories[:-1], histories[1:], strict=True):
            inner = hessian[own, own]
            wanted = decoded[own] - torch.linalg.solve(inner, gradient[own])
            found, _ = feed_back(trellis, wanted, feedback._inverse_root(inner, torch.tensor(0.0)), start, end)
            before, after = ((inner @ (each - wanted) * (each - wanted)).sum(0) for each in (decoded[own], found))
            change = torch.where(after < before, found - decoded[own], 0)
            gradient += hessian[:, own] @ change
            decoded[own] += change
    return torch.empty_like(decoded).index_copy_(0, order, decoded).T


def coded(weight, second, trellis, how):
    """The weight ``[N, K]`` that a dense one becomes, and two squared errors, of the stored weight and of outputs."""
    generator = torch.Generator().manual_seed(how.draw)
    steps = torch.randint(-1, 2, (weight.shape[1],), generator=generator) if how.draw else 0
    columns = (balance(weight) + steps).to(torch.uint8)
    packed = quantize_weight(weight, codebooks.optimal(trellis.bits, True), True, "rotated", columns=columns)
    columns = decode_e4m4(columns)
    hessian, stored = of_moments(second, columns), to_stored(weight, columns, rotated=True)
    if trellis.histories == 1 and not how.blocks:
        if not how.no_data:
            planes, absmax = _rounded(weight, Moments(second, None), packed, feedback)
            packed = packed._replace(planes=planes, absmax=absmax)
        levels, shape = packed.decoding.codebook(weight.device), list(weight.shape)
        original = reference.dequantize(*packed[:2], levels, shape, torch.float32, packed.columns, True)
        decoded = to_stored(original, columns, rotated=True)
    else:
        largest = stored.unflatten(1, (-1, 32)).square().mean(-1).sqrt().max()
        unit = 2.0 ** (torch.frexp(largest).exponent + 4)  # the scales hold root mean squares up to an eighth
        if how.no_data:
            decoded = trellis.quantize(stored.T / unit, steps=range(-8, 9, 2))[0].T * unit
        else:
            decoded = solve(trellis, stored / unit, hessian, how.sweeps, not how.blocks) * unit
        original = to_original(decoded, columns, True, weight.shape[1])
    lost, all_of = (((each @ hessian) * each).sum() for each in (decoded - stored, stored))
    return original, error(decoded, stored), (lost / all_of).item()


# --- a model --------------------------------------------------------------------------------------


def linears(model):
    return {name: module for name, module in model.named_modules() if name.endswith("_proj")}


def tokens(folder, name, count):
    return load_file(folder / f"{name}.safetensors")["tokens"][:count].long()


def moments(model, ids):
    found = {}

    def hook(name):
        def take(_, inputs):
            x = inputs[0].flatten(0, -2)
            found[name] = found.get(name, 0) + x.T @ x

        return take

    for name, module in linears(model).items():
        if name.rpartition(".")[2] not in SHARED:
            module.register_forward_pre_hook(hook(name))
    for text in ids.split(1024):
        model.model(text[None])
    return found


def divergence(model, hidden, ids):
    """Of each token KL(reference || model) and the model's negative log-likelihood, from the reference's states."""
    found = []
    for text, state in zip(ids.split(WINDOW), hidden.split(WINDOW), strict=True):
        own = model.model(text[None]).last_hidden_state[0]
        for part in torch.arange(len(text) - 1).split(256):
            q, p = (model.lm_head(each[part]).log_softmax(-1) for each in (state, own))
            found.append(torch.stack([(q.exp() * (q - p)).sum(-1), -p.gather(1, text[part + 1, None])[:, 0]]))
    return torch.cat(found, 1)


def with_error(values):
    return f"{values.mean():.4f} +- {values.std() / len(values) ** 0.5:.4f}"


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("trellis", help="bits,window or bits,window,remembered; or moments")
    parser.add_argument("--no-data", action="store_true", help="without feedback")
    parser.add_argument("--blocks", action="store_true", help="feedback between blocks only")
    parser.add_argument("--sweeps", type=int, default=0)
    parser.add_argument("--draw", type=int, default=0, help="column scales a step off by chance: other roundings")
    parser.add_argument("--tokens", type=int, default=8192, help="held-out tokens; of moments tokens of calibration")
    parser.add_argument("--every", type=int, default=1, help="codes one layer of so many, and says its errors only")
    parser.add_argument("--against", nargs="*", default=[])
    parser.add_argument("--keep", type=Path, default=Path("trellis"))
    how = parser.parse_args()
    how.keep.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(how.model, dtype=torch.float32).eval()
    if how.trellis == "moments":
        save_file(moments(model, tokens(how.model, "calibration", how.tokens)), how.keep / "moments.safetensors")
        return
    ids, states = tokens(how.model, "held_out", how.tokens), how.keep / f"states-{how.tokens}.safetensors"
    if not states.exists() and how.every == 1:
        save_file({"of": torch.cat([model.model(text[None])[0][0] for text in ids.split(WINDOW)])}, states)
    second = load_file(how.keep / "moments.safetensors")
    trellis = trained(*named(how.trellis), how.keep)
    feedback.SWEEPS = how.sweeps
    way = "no-data" if how.no_data else f"{'blocks' if how.blocks else 'columns'}-{how.sweeps}"
    run, began, errors = f"{how.trellis}-{way}" + f"-draw-{how.draw}" * (how.draw > 0), time.time(), []
    for number, (name, module) in enumerate(linears(model).items()):
        if number // 7 % how.every == 0:
            last = name.rpartition(".")[2]
            given = second[name.removesuffix(last) + SHARED.get(last, last)]
            module.weight.data, *found = coded(module.weight.data, given, trellis, how)
            errors.append(found)
    mean = torch.tensor(errors).log().mean(0).exp().tolist()
    print(f"{run}: errors {mean[0]:.5f} of weights, {mean[1]:.6f} of outputs, {time.time() - began:.0f} s", flush=True)
    if how.every > 1:
        return
    found = divergence(model, load_file(states)["of"], ids)
    save_file({"found": found}, how.keep / f"{run}.safetensors")
    print(
        f"  KL {with_error(found[0])}, perplexity {found[1].mean().exp():.3f}, {time.time() - began:.0f} s", flush=True
    )
    for other in how.against:
        before = load_file(how.keep / f"{other}.safetensors")["found"][0]
        change = (found[0] - before) / before.mean()
        print(f"  {with_error(change)} of the divergence of {other}", flush=True)


if __name__ == "__main__":
    main()
