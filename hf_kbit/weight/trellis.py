"""The kind of packed weight that has a trellis: EXL3's form (``format/trellis.py``)."""

from dataclasses import replace

import torch
from torch.nn import functional as F

from hf_kbit.format.trellis import TILE, TrellisDecoding
from hf_kbit.ops import trellis as ops
from hf_kbit.weight import trellis_packing
from hf_kbit.weight.tensor import KbitTensor


class TrellisTensor(KbitTensor):
    """A weight of 1 to 8 bits, whose matrices are rotated on both sides.

    ``parts`` are ``words``, int16 ``[*lead, N / 16, K / 16, 16 * bits]``: what files have, with rows first, seen in
    their memory; ``suh``, float16 ``[*lead, K]``, and ``svh``, float16 ``[*lead, N]``. N and K are padded. Where
    several matrices are one below the other (``TrellisDecoding.stacked``) their number comes behind ``lead``.

    Rows are cut between tiles, and decode where they are cut between blocks of the rotation.
    """

    decodes = TrellisDecoding
    files = {"words": "trellis", "suh": "suh", "svh": "svh"}

    suh = property(lambda self: self.parts["suh"])
    svh = property(lambda self: self.parts["svh"])

    @classmethod
    def inner(cls, decoding):
        return list(cls.files)

    @classmethod
    def parts_of(cls, tensors, decoding):
        parts = {own: tensors[name] for own, name in cls.files.items()}
        return parts | {"words": parts["words"].transpose(-3, -2)}

    @classmethod
    def settings(cls, decoding):
        return {"how": (decoding.code, decoding.block)}

    def file_tensors(self, device=None):
        tensors = super().file_tensors(device)
        return tensors | {"trellis": tensors["trellis"].transpose(-3, -2).contiguous()}

    @property
    def lead(self):
        return tuple(self.words.shape[: -4 if self.decoding.stacked > 1 else -3])

    # --- between it and floats ---

    @staticmethod
    def quantize(weight, decoding, recipe, name, columns=None):
        return trellis_packing.quantize(weight, decoding, recipe.balances, name, columns)

    def decoded(self, dtype):
        if self.svh.shape[-1] % self.decoding.block:
            raise ValueError(
                f"{self.qualified_name}: found {self.matrix[0]} rows of a weight that is rotated in blocks of "
                f"{self.decoding.block}, expected all of it in this process to decode it"
            )
        parts = self.parts
        if self.decoding.stacked > 1 and not self.lead:  # else it would be told from experts
            parts = parts | {own: parts[own][None] for own in self.files}
        return torch.ops.hf_kbit.dequantize_trellis(*_operands(parts), dtype)

    @staticmethod
    def product(x, parts, bias):
        return ops.product(x, bias, *_operands(parts))

    @classmethod
    def product_int8(cls, x, parts, bias):
        return ops.product_int8(x, bias, *_operands(parts))

    @staticmethod
    def products(x: torch.Tensor, biases: list, parts: list[dict], int8: bool) -> list[torch.Tensor]:
        """``product`` by several weights, whose code and block are the same, or ``product_int8``."""
        return ops.products(x, biases, list(map(_operands, parts)), int8)

    @staticmethod
    def experts_product(x, parts, bias, rows, offsets, swiglu):
        return ops.experts_product(x, bias, rows, offsets, *_operands(parts), swiglu)

    @classmethod
    def experts_product_int8(cls, x, parts, bias, rows, offsets, swiglu):
        return ops.experts_product_int8(x, bias, rows, offsets, *_operands(parts), swiglu)

    def look_up(self, ids):
        """Rows of a block are not apart, so all are decoded."""
        return F.embedding(ids, self.dequantize())

    # --- parts ---

    def _of(self, lead: tuple[int, ...], matrix: tuple[int, int], words, suh, svh) -> "TrellisTensor":
        return self.like((*lead, *matrix), words=words, suh=suh, svh=svh, matrix=matrix)

    def rows(self, dim, start, stop):
        (rows, width), suh = self.matrix, self.suh
        if dim < len(self.lead):
            words, suh, svh = (self.parts[own][(slice(None),) * dim + (slice(start, stop),)] for own in self.files)
            return self._of(tuple(words.shape[: len(self.lead)]), self.matrix, words, suh, svh)
        if (start, stop) == (0, rows):
            return self.like(self.whole_shape)
        if (stacked := self.decoding.stacked) > 1 and start * stacked // rows == (stop - 1) * stacked // rows:
            part, each = start * stacked // rows, rows // stacked
            return self._one(part).rows(dim, start - part * each, stop - part * each)
        self._check_cut(start, stop)
        if suh.dim() > 1 and not self.lead:  # gathered: a process's part
            suh = suh[start // (rows // len(suh))]
        words, svh = self.words[..., start // TILE : stop // TILE, :, :], self.svh[..., start:stop]
        return self._of(self.lead, (stop - start, width), words, suh, svh)

    def _one(self, part: int) -> "TrellisTensor":
        """One of the matrices that lie one below the other, of each expert."""
        return self._stack(*(self.parts[own].select(len(self.lead), part) for own in self.files), stacked=1)

    def _stack(self, words, suh, svh, stacked: int) -> "TrellisTensor":
        """Other matrices of each expert, so many one below the other."""
        rows, decoding = stacked * svh.shape[-1], replace(self.decoding, stacked=stacked)
        parts = self.parts | {"words": words, "suh": suh, "svh": svh, "matrix": (rows, self.matrix[1])}
        return TrellisTensor((*self.lead, *parts["matrix"]), parts, decoding, self.form.dtype, self.tiles)

    def _unstacked(self) -> list[torch.Tensor]:
        """The tensors, with a dimension for how many matrices lie one below the other."""
        parts = [self.parts[own] for own in self.files]
        return parts if self.decoding.stacked > 1 else [part.unsqueeze(len(self.lead)) for part in parts]

    def _check_cut(self, *places: int) -> None:
        """Refuses to cut rows between these places."""
        if self.decoding.stacked > 1 or self.svh.shape[-1] != self.matrix[0] or any(place % TILE for place in places):
            found = f"found {self.matrix[0]} rows ({self.decoding.stacked} matrices) to be cut at {list(places)}"
            raise ValueError(
                f"{self.qualified_name}: {found}, expected one matrix without padding, and multiples of {TILE}, the "
                "rows of a tile"
            )

    def matrix_at(self, index):
        return self._of(self.lead[1:], self.matrix, *(self.parts[own][index] for own in self.files))

    def cut_columns(self, start, stop):
        end = self.suh.shape[-1] if stop == self.matrix[1] else stop
        words, suh = self.words[..., start // TILE : end // TILE, :], self.suh[..., start:end]
        return self._of(self.lead, (self.matrix[0], stop - start), words, suh, self.svh)

    def picked(self, dim, index):
        if dim == len(self.lead):
            return self._reordered(index)
        words, suh, svh = (self.parts[own].index_select(dim, index) for own in self.files)
        return self._of(tuple(words.shape[: len(self.lead)]), self.matrix, words, suh, svh)

    def _reordered(self, index: torch.Tensor) -> "TrellisTensor":
        """Matrices that lie one below the other in another order; of those with the same scales of inputs one is made,
        where that gives them all one size: what several processes had of each of two is put together so."""
        lead, each = len(self.lead), self.matrix[0] // self.decoding.stacked
        starts = index[::each]
        if not torch.equal(index, (starts[:, None] + torch.arange(each, device=index.device)).flatten()):
            return NotImplemented
        words, suh, svh = (part.index_select(lead, starts // each) for part in self._unstacked())
        count = len(starts)
        for size in (size for size in range(count, 1, -1) if not count % size):
            groups = suh.unflatten(lead, (-1, size))
            first = groups.narrow(lead + 1, 0, 1)
            if torch.equal(groups, first.expand_as(groups)):
                words = words.unflatten(lead, (-1, size)).flatten(lead + 1, lead + 2)
                suh, svh = first.squeeze(lead + 1), svh.unflatten(lead, (-1, size)).flatten(lead + 1, lead + 2)
                break
        stacked = words.shape[lead]
        if stacked == 1:
            words, suh, svh = (part.squeeze(lead) for part in (words, suh, svh))
        return self._stack(words, suh, svh, stacked)

    def joined(self, others, dim):
        (rows, width), tensors, lead = self.matrix, [self, *others], len(self.lead)
        parts = {own: [tensor.parts[own] for tensor in tensors] for own in self.files}

        def differ(own: str) -> bool:
            return any(not torch.equal(each, parts[own][0]) for each in parts[own])

        if dim < lead:
            words, suh, svh = (torch.cat(each, dim) for each in parts.values())
            return self._of(tuple(words.shape[:lead]), self.matrix, words, suh, svh)
        alike = all(tensor.matrix == self.matrix for tensor in others) and self.svh.shape[-1] % TILE == 0
        if dim == lead and lead and alike and (self.decoding.stacked > 1 or differ("suh")):
            parts = [torch.cat(own, lead) for own in zip(*(tensor._unstacked() for tensor in tensors), strict=True)]
            return self._stack(*parts, stacked=parts[0].shape[lead])
        padded = any(t.svh.shape[-1] != t.matrix[0] or t.suh.shape[-1] != t.matrix[1] for t in tensors[:-1])
        if padded or self.decoding.stacked > 1 or differ("suh" if dim == lead else "svh"):
            return NotImplemented
        if dim == lead:
            rows, suh, svh = sum(tensor.matrix[0] for tensor in tensors), self.suh, torch.cat(parts["svh"], -1)
        else:
            width, suh, svh = sum(tensor.matrix[1] for tensor in tensors), torch.cat(parts["suh"], -1), self.svh
        return self._of(self.lead, (rows, width), torch.cat(parts["words"], dim - lead - 3), suh, svh)

    def padded(self, missing):
        pads = {own: (*(0,) * (2 * self.parts[own].dim() - 1), missing) for own in self.files}
        if self.lead:
            words, suh, svh = (F.pad(self.parts[own], pad) for own, pad in pads.items())
            return self._of((len(words), *self.lead[1:]), self.matrix, words, suh, svh)
        rows, width = self.matrix
        self._check_cut(rows, missing)
        words = F.pad(self.words, (*pads["words"][:-1], missing // TILE))
        return self._of((), (rows + missing, width), words, self.suh, F.pad(self.svh, pads["svh"]))

    def room(self, size, device):
        """Rows have the scales of inputs that this one has."""
        rows, width = size[-2:]
        if self.lead:
            words, suh, svh = (
                self.parts[own].new_zeros((size[0], *self.parts[own].shape[1:]), device=device) for own in self.files
            )
            return self._of(tuple(size[:-2]), self.matrix, words, suh, svh)
        self._check_cut(rows)
        words = self.words.new_zeros((rows // TILE, *self.words.shape[1:]), device=device)
        suh = self.suh if device is None else self.suh.to(device)
        return self._of((), (rows, width), words, suh, self.svh.new_zeros(rows, device=device))

    # --- several processes ---

    def gathered(self, gather):
        """Where scales of inputs differ they are a row for each process: such parts belong side by side, and must not
        be read before."""
        words, suh, svh = (gather(_sent(self.parts[own])) for own in self.files)
        words = words.view(torch.int16)
        if self.lead:
            return self._of((len(words), *self.lead[1:]), self.matrix, words, suh, svh)
        every, (rows, width) = suh.view(-1, *self.suh.shape), self.matrix
        suh = self.suh if torch.equal(every, self.suh.expand_as(every)) else every
        return self._of((), (rows * len(every), width), words, suh, svh)

    def rows_sent(self):
        """Of each row a sixteenth of what its tiles have."""
        if self.decoding.stacked == 1:
            self._check_cut(self.matrix[0])
        tiles = self.words.shape[:-2]
        suh = self.suh.unsqueeze(-2).expand(*tiles, -1)
        parts = self.words.flatten(-2), suh, self.svh.unflatten(-1, (-1, TILE))
        sent = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
        return sent.reshape(*self.lead, self.matrix[0], -1)

    def of_rows_sent(self, rows):
        lead = rows.shape[:-2]
        stacked = [self.decoding.stacked] if self.decoding.stacked > 1 else []
        padded = self.suh.shape[-1]
        sizes = [2 * self.bits * padded, 2 * padded, 2 * TILE]
        sent = rows[..., : sum(sizes) // TILE].reshape(*lead, *stacked, -1, sum(sizes))
        words, suh, svh = (part.contiguous() for part in sent.split(sizes, -1))
        words = words.view(torch.int16).unflatten(-1, (padded // TILE, -1))
        scales = suh[..., 0, :].contiguous().view(torch.float16), svh.view(torch.float16).flatten(-2)
        return dict(zip(self.files.values(), (words.transpose(-3, -2), *scales), strict=True))

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        if not self.lead:
            self._check_cut(outer_size[0] // mesh.size())
        names = self.files if self.lead else ("words", "svh")
        own = tuple(_sent(self.parts[name]) for name in names)
        # With one process FSDP2 gathers the first tensor alone.
        return own, (outer_size, mp_policy.param_dtype or self.form.dtype, tuple(names), own[1:])

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        size, dtype, names, rest = metadata
        gathered = gathered if len(gathered) == len(names) else (*gathered, *rest)
        parts = dict(zip(names, gathered, strict=True))
        parts["words"] = parts["words"].view(torch.int16)
        if out is None:
            return self.like(size, dtype, **parts, matrix=tuple(size[-2:])), ()
        own = getattr(out, "_local_tensor", out)
        own.decoding = self.decoding  # which another state dict may have changed
        own.parts.update({**parts, "suh": parts.get("suh", self.suh), **self.settings(self.decoding)})
        return None


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    """As processes can send it: neither NCCL nor Gloo knows int16."""
    tensor = tensor.contiguous()
    return tensor.view(torch.int32) if tensor.dtype == torch.int16 else tensor


def _operands(parts: dict) -> tuple:
    """What the ops want of a weight."""
    return parts["words"], parts["suh"], parts["svh"], list(parts["matrix"]), *parts["how"]
