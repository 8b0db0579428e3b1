"""The scalar kind of packed weight: levels in blocks, which a GPU holds as tiles for its kernels."""

import math

import torch
from torch import nn

from hf_kbit.format import reference
from hf_kbit.format.decoding import ScalarDecoding
from hf_kbit.format.reference import TILE_ROWS
from hf_kbit.format.spec import BLOCK_SIZE, num_blocks
from hf_kbit.ops import gemm_experts, native, product
from hf_kbit.weight.tensor import KbitTensor


def reads_tiles(device: torch.device) -> bool:
    """Whether the kernels of a device read tiles."""
    return device.type == "cuda" and native.library("cuda").loaded


class ScalarTensor(KbitTensor):
    """A weight of 2, 3, 4 or 5 bits (``format/spec.py``).

    ``parts`` are ``words``, int32 ``[*lead, N, B * bits]`` or tiles; ``absmax``, uint8 ``[*lead, N, B]`` or tiles;
    ``codebook``, float32 ``[2**bits]``; ``columns``, uint8 ``[K]`` or None; and, where a layer has found it,
    ``inverses`` (``ops.int8_inverses``).
    """

    decodes = ScalarDecoding
    files = dict(zip(("words", "absmax", "columns"), ScalarDecoding.names, strict=True))

    absmax = property(lambda self: self.parts["absmax"])
    codebook = property(lambda self: self.parts["codebook"])
    columns = property(lambda self: self.parts["columns"])

    @classmethod
    def inner(cls, decoding):
        return ["words", "absmax", "codebook", *(["columns"] if decoding.transformed else [])]

    @classmethod
    def parts_of(cls, tensors, decoding):
        found = {own: tensors.get(name) for own, name in cls.files.items()}
        return found | {"codebook": decoding.codebook(found["words"].device)}

    @property
    def lead(self):
        return tuple(self.words.shape[: -5 if self.is_tiled else -2])

    # --- forms ---

    @property
    def is_tiled(self):
        return reference.is_tiled(self.words, self.absmax, self.bits)

    def _repacked(self, inverse: bool) -> "ScalarTensor":
        words, absmax = torch.ops.hf_kbit.repack(self.words, self.absmax, self.bits, list(self.matrix), inverse)
        return self.like(words=words, absmax=absmax)

    def settled(self):
        return self.tiled() if self.tiles and reads_tiles(self.words.device) else self

    def tiled(self) -> "ScalarTensor":
        """The weight as tiles, whatever its device reads."""
        return self if self.is_tiled else self._repacked(inverse=False)

    def as_stored(self):
        return self._repacked(inverse=True) if self.is_tiled else self

    def moved(self, device, dtype=None):
        made = super().moved(device, dtype)
        if self.words.is_meta:
            made.parts["codebook"] = self.decoding.codebook(device)
        return made

    # --- between it and floats ---

    @staticmethod
    def quantize(weight, decoding, recipe, name, columns=None):
        return recipe.quantize_scalar(weight, decoding.levels, name, columns)

    def decoded(self, dtype):
        parts, transformed = self.parts, self.decoding.transformed
        how = parts["codebook"], list(parts["matrix"]), dtype, parts["columns"]
        return torch.ops.hf_kbit.dequantize(parts["words"], parts["absmax"], *how, transformed)

    @staticmethod
    def product(x, parts, bias):
        columns = parts["columns"]
        how = bias, parts["matrix"][0], columns, columns is not None
        return product(x, parts["words"], parts["absmax"], parts["codebook"], *how)

    @staticmethod
    def experts_product(x, parts, bias, rows, offsets, swiglu):
        packed, columns = (parts["words"], parts["absmax"], parts["codebook"]), parts["columns"]
        return gemm_experts(x, *packed, bias, rows, offsets, parts["matrix"][0], columns, columns is not None, swiglu)

    def look_up(self, ids):
        parts, form = self.parts, self.form
        how = parts["codebook"], list(parts["matrix"]), form.dtype, parts["columns"], form.decoding.transformed
        return torch.ops.hf_kbit.embed(ids, parts["words"], parts["absmax"], *how)

    # --- parts ---

    def rows(self, dim, start, stop):
        weight = self
        if weight.columns is not None and weight.columns.dim() > 1 and not dim:  # gathered: a process's part
            step = weight.outer_shape[0] // len(weight.columns)
            if stop - start == step and not start % step:
                weight = weight.like(columns=weight.columns[start // step])
        if dim < len(weight.lead):
            index = (slice(None),) * dim + (slice(start, stop),)
            words, absmax = weight.words[index], weight.absmax[index]
            return weight.like((*words.shape[: len(weight.lead)], *weight.matrix), words=words, absmax=absmax)
        # A row of tiles is sixteen rows of the matrix.
        aligned = start < stop and not (start % TILE_ROWS or (stop % TILE_ROWS and stop < weight.matrix[0]))
        weight = weight if aligned else weight.as_stored()
        unit = TILE_ROWS if weight.is_tiled else 1
        part = (slice(None),) * dim + (slice(start // unit, -(-stop // unit)),)
        matrix = stop - start, weight.matrix[1]
        words, absmax = weight.words[part], weight.absmax[part]
        return weight.like((*weight.lead, *matrix), words=words, absmax=absmax, matrix=matrix)

    def matrix_at(self, index):
        words, absmax = self.words[index], self.absmax[index]
        return self.like((*self.lead[1:], *self.matrix), words=words, absmax=absmax)

    def cut_columns(self, start, stop):
        weight, height, bits = self.as_stored(), self.matrix[0], self.bits
        first, last = start // BLOCK_SIZE, -(-stop // BLOCK_SIZE)
        return weight.like(
            (*weight.lead, height, stop - start),
            words=weight.words[..., first * bits : last * bits],
            absmax=weight.absmax[..., first:last],
            columns=None if weight.columns is None else weight.columns[start:stop],
            matrix=(height, stop - start),
        )

    def _of_rows(self, words: torch.Tensor, absmax: torch.Tensor, **parts) -> "ScalarTensor":
        """``like``, of planes and scales of other rows or matrices."""
        matrix = words.shape[-2], self.matrix[1]
        return self.like((*words.shape[:-2], *matrix), words=words, absmax=absmax, matrix=matrix, **parts)

    def picked(self, dim, index):
        stored = self.as_stored()
        return self._of_rows(*(tensor.index_select(dim, index) for tensor in (stored.words, stored.absmax)))

    def joined(self, others, dim):
        stored, columns = [tensor.as_stored() for tensor in (self, *others)], self.columns
        width = sum(tensor.matrix[1] for tensor in stored) if dim == len(self.lead) + 1 else self.matrix[1]
        if width != self.matrix[1]:
            if any(tensor.matrix[1] % BLOCK_SIZE for tensor in stored[:-1]):
                return NotImplemented
            columns = None if columns is None else torch.cat([tensor.columns for tensor in stored])
        elif any(t.columns is not columns and not torch.equal(t.columns, columns) for t in others):
            return NotImplemented
        words, absmax = (torch.cat([tensor.parts[name] for tensor in stored], dim) for name in ("words", "absmax"))
        parts = {"words": words, "absmax": absmax, "columns": columns, "matrix": (words.shape[-2], width)}
        return self.like((*words.shape[:-2], *parts["matrix"]), **parts)

    def padded(self, missing):
        stored = self.as_stored()
        pad = (*(0,) * (2 * stored.words.dim() - 1), missing)
        return self._of_rows(*(nn.functional.pad(tensor, pad) for tensor in (stored.words, stored.absmax)))

    def room(self, size, device):
        stored, blocks = self.as_stored(), num_blocks(size[-1])
        widths = (stored.words, blocks * self.bits), (stored.absmax, blocks)
        made = self._of_rows(*(tensor.new_zeros((*size[:-1], width), device=device) for tensor, width in widths))
        whole_tiles = math.prod(size) and (self.lead or not size[0] % TILE_ROWS)
        return made.tiled() if self.is_tiled and whole_tiles else made

    # --- several processes ---

    def gathered(self, gather):
        """Where column scales of processes differ they are a row for each: such parts belong side by side, and must
        not be read before."""
        stored = self.as_stored()
        words, absmax, columns = gather(stored.words), gather(stored.absmax), stored.columns
        if columns is not None:
            every = gather(columns[None])
            columns = columns if torch.equal(every, columns.expand_as(every)) else every
        return self._of_rows(words, absmax, columns=columns)

    def rows_sent(self):
        rows, columns = self._bytes_of_rows(), self.columns
        if columns is None:
            return rows
        return torch.cat([columns.expand(*rows.shape[:-1], len(columns)), rows], -1)

    def of_rows_sent(self, rows):
        columns, width = None, self.matrix[1]
        if self.decoding.transformed:
            columns, rows = rows.tensor_split([width], -1)
            columns = columns.flatten(0, -2)[0].clone()
        tensors = *_of_bytes(rows, width, self.bits), columns
        return dict(zip(self.files.values(), tensors, strict=True))

    def _bytes_of_rows(self) -> torch.Tensor:
        """uint8 ``[*lead, N, 4 * B * bits + B]``: the planes and scales of each row."""
        stored = self.as_stored()
        return torch.cat([stored.words.contiguous().view(torch.uint8), stored.absmax], -1)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """Words and scales; where rows are no multiple of the processes the bytes of both, for then FSDP2 gathers
        nothing but tensors of the shape of a weight."""
        form, lead, processes = self.form, self.lead, mesh.size()
        dtype = mp_policy.param_dtype or form.dtype
        if outer_size[0] % processes:
            rows, width = self._bytes_of_rows(), outer_size[-1]
            missing = -(-outer_size[0] // processes) - len(rows)
            count = -(-rows.shape[-1] // width)
            padding = (0, count * width - rows.shape[-1], *(0,) * 2 * len(lead), 0, missing)
            parts = nn.functional.pad(rows, padding).split(width, -1)
            return tuple(part.contiguous() for part in parts), (outer_size, dtype, None)
        # The form that all processes find, whatever has come to this one.
        tiles = self.tiles and reads_tiles(self.words.device) and (lead or not outer_size[0] % (TILE_ROWS * processes))
        packed = self.settled() if tiles else self.as_stored()
        # With one process FSDP2 gathers the first tensor alone.
        return (packed.words.contiguous(), packed.absmax.contiguous()), (outer_size, dtype, packed.absmax)

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        size, dtype, rest = metadata
        if uneven := rest is None:
            gathered = _of_bytes(torch.cat(gathered, -1)[: size[0]], size[-1], self.bits)
        words, absmax = gathered if len(gathered) > 1 else (*gathered, rest)
        if out is None:
            made = self.like(size, dtype, words=words, absmax=absmax, matrix=tuple(size[-2:]))
            return made, gathered if uneven else ()  # what FSDP2 is to free, besides what it has gathered
        own = getattr(out, "_local_tensor", out)
        own.decoding = self.decoding  # which another state dict may have changed
        own.parts.update(codebook=self.codebook, columns=self.columns)
        own.parts.pop("inverses", None)
        if not uneven:  # the tensors that it has had before, but for one process
            own.parts.update(words=words, absmax=absmax)
            return None
        with torch.autograd._unsafe_preserve_version_counter((own.words, own.absmax)):
            torch._foreach_copy_((own.words, own.absmax), gathered)
        return None


def _of_bytes(rows: torch.Tensor, width: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Planes and scales, copied out of what ``_bytes_of_rows`` has made of them; what is behind them is passed by."""
    blocks = num_blocks(width)
    parts = rows.tensor_split([4 * bits * blocks, (4 * bits + 1) * blocks], -1)[:2]
    words, absmax = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return words.view(torch.int32), absmax
