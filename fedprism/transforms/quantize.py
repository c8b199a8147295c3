"""quantize: updates are sent with 8 or 4 bits per number, rounded at random so that they are right on average."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedprism.config import positive, setting
from fedprism.errors import FedprismError
from fedprism.methods.states import State, length
from fedprism.store.serialize import size
from fedprism.transforms import TRANSFORMS
from fedprism.transforms.base import MARK, Transform, UploadContext

CODES, SCALES, SHAPE = f"{MARK}codes", f"{MARK}scales", f"{MARK}shape"


@TRANSFORMS.register("quantize")
@dataclass(frozen=True)
class Quantize(Transform):
    """send an update with 8 or 4 bits per number, rounded at random"""

    id = "quantize"
    idea = (
        "Each bucket of an update is divided by its largest absolute value over 2^(bits-1) - 1 and rounded up or down "
        "at random, so that its expected value is unchanged (as in QSGD, Alistarh et al., NeurIPS 2017)."
    )
    shows = {
        "quantize/bytes": "bytes that are sent of the leaves it acts on, as a share of their bytes before",
        "quantize/error": "length of the rounding error over the length of the update",
    }
    packs = True

    bits: Literal[8, 4] = setting(8, "bits per number")
    bucket: int = setting(512, "numbers that share a scale", positive, "1 or more")

    @property
    def levels(self) -> int:
        """Steps from 0 to the largest absolute value."""
        return (1 << self.bits - 1) - 1

    def bucket_of(self, count: int) -> int:
        """Numbers that share a scale in a leaf of `count` numbers."""
        return max(1, min(self.bucket, count))

    def client(self, upload: State, context: UploadContext) -> State:
        chosen = context.chosen(upload, self.kinds)
        update, sent, errors = context.update(chosen), State(), State()
        for name, u in update.items():
            flat = u.detach().flatten()
            codes, scales = self.rounded(flat, context.rng(name, u))
            sent |= {name + CODES: self.packed(codes), name + SCALES: scales}
            errors[name] = self.values(codes, scales) - flat
            if not context.known(name, u.shape):  # then the server does not know its shape
                sent[name + SHAPE] = torch.tensor(u.shape, dtype=torch.int64, device=u.device)
        context.log("quantize/bytes", size(sent) / max(1, size(chosen)))
        context.log("quantize/error", float(length(errors)) / max(float(length(update)), 1e-300))
        return {**{name: tensor for name, tensor in upload.items() if name not in chosen}, **sent}

    def server(self, sent: State, context: UploadContext) -> State:
        # Another `quantize` may have packed leaves of other kinds.
        own = [name for name, kind in context.kinds.items() if kind in self.kinds and name + CODES in sent]
        parts = {name + part for name in own for part in (CODES, SCALES, SHAPE)}
        upload = {name: tensor for name, tensor in sent.items() if name not in parts}
        for name in own:
            codes, scales = sent[name + CODES], sent[name + SCALES]
            shape = sent[name + SHAPE].tolist() if name + SHAPE in sent else context.origin[name].shape
            self._check(name, codes, scales, math.prod(shape))
            update = {name: self.values(self.unpacked(codes, math.prod(shape)), scales).view(shape)}
            upload |= context.add_origin(update)
        return upload

    def rounded(self, u: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Whole numbers from -levels to levels as int8 `[n]`, and a scale per bucket `[ceil(n / bucket)]`."""
        bucket, wide = self.bucket_of(len(u)), torch.promote_types(u.dtype, torch.float32)  # 16 bits round x + noise
        padded = torch.nn.functional.pad(u, (0, -len(u) % bucket)).view(-1, bucket)
        scales = padded.abs().amax(1).to(wide) / self.levels
        if wide != u.dtype:  # 16 bits: the next scale above, with which the largest number still has a code
            info = torch.finfo(u.dtype)
            scales = torch.where(scales > 0, scales * (1 + info.eps) + info.tiny * info.eps, 0).to(u.dtype)
        divisors = scales.to(wide).unsqueeze(1)
        x = torch.where(divisors > 0, padded.to(wide) / divisors, 0).flatten()[: len(u)]
        noise = torch.rand(len(u), generator=generator, device=u.device, dtype=wide)
        return (x + noise).floor().clamp(-self.levels, self.levels).to(torch.int8), scales

    def values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The numbers `[n]` that codes stand for."""
        wide = scales.to(torch.promote_types(scales.dtype, torch.float32))
        products = codes.to(wide.dtype) * wide.repeat_interleave(self.bucket_of(len(codes)))[: len(codes)]
        if wide.dtype == scales.dtype:
            return products
        limit = torch.finfo(scales.dtype).max
        return products.clamp(-limit, limit).to(scales.dtype)

    def packed(self, codes: Tensor) -> Tensor:
        """Codes as they are sent: two of 4 bits in a byte."""
        if self.bits == 8:
            return codes
        nibbles = torch.nn.functional.pad(codes + 8, (0, len(codes) % 2)).to(torch.uint8).view(-1, 2)
        return nibbles[:, 0] * 16 + nibbles[:, 1]

    def unpacked(self, packed: Tensor, count: int) -> Tensor:
        """The inverse of `packed`."""
        if self.bits == 8:
            return packed
        return (torch.stack([packed // 16, packed % 16], 1).flatten()[:count].to(torch.int8)) - 8

    def _check(self, name: str, codes: Tensor, scales: Tensor, count: int) -> None:
        """Refuse codes that are not of `count` numbers."""
        found = (codes.dtype, tuple(codes.shape), tuple(scales.shape), scales.is_floating_point())
        dtype, many = (torch.int8, count) if self.bits == 8 else (torch.uint8, -(-count // 2))
        expected = (dtype, (many,), (-(-count // self.bucket_of(count)),), True)
        if found != expected:
            raise FedprismError(
                f"{name} is sent as {found[0]} {found[1]} with scales {found[2]}; expected {expected[0]} {expected[1]} "
                f"with floating scales {expected[2]}"
            )
