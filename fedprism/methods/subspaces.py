"""A low-dimensional subspace of weights: orthonormal columns `[numbers, dimensions]`, never a matrix of L x L."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedprism import keys
from fedprism.errors import ConfigError
from fedprism.methods.states import Tensors

ROWS = 1 << 16  # rows per block
INSIDE = 1e-6  # a unit vector with less than this outside of the subspace counts as inside
NOTHING = 1e-12  # singular values below this fraction of the largest count as 0


class Subspace(Tensors):
    """A basis P `[L, R]`, initially random, that takes in updates d by the truncated SVD of [P diag(values), d].

    raw: the values are 1 and d is unchanged. normalised: d has length 1. keep-singular-values: the values are those of
    the last SVD, initially 0, so that the random start has no weight.
    """

    def __init__(self, size: int, rank: int, delta: str, *purpose: int | str) -> None:
        if size < rank:
            raise ConfigError(
                f"a subspace of {rank} dimensions was asked for, but its layers hold {size} numbers; ask for fewer "
                "dimensions or for more layers."
            )
        basis = keys.orthonormal(size, rank, *purpose).to(torch.get_default_dtype())
        values = {"values": torch.zeros(rank)} if delta == "keep-singular-values" else {}
        super().__init__({"basis": basis, **values})
        self.delta = delta

    def outside(self, d: Tensor) -> Tensor:
        """The part of d `[L]` that is orthogonal to the subspace."""
        return d - self["basis"] @ (self["basis"].T @ d)

    @torch.no_grad()
    def share(self, d: Tensor) -> Tensor:
        """The share of |d|^2 inside the subspace; 0 if d is 0."""
        gram = self._gram(d)
        return gram[:-1, -1].square().sum() / gram[-1, -1].clamp(min=torch.finfo(gram.dtype).tiny)

    def _blocks(self, d: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield [P, d] in double precision in blocks of rows, each with its rows of the basis."""
        basis = self["basis"]
        for begin in range(0, len(d), ROWS):
            rows = basis[begin : begin + ROWS]
            yield rows, torch.cat([rows, d[begin : begin + ROWS].unsqueeze(1)], 1).double()

    def _gram(self, d: Tensor) -> Tensor:
        """The products of the columns of [P, d]: P^T P, P^T d and |d|^2."""
        size = self["basis"].shape[1] + 1
        gram = torch.zeros(size, size, dtype=torch.float64, device=d.device)
        for _, a in self._blocks(d):
            gram.addmm_(a.T, a)
        return gram

    @torch.no_grad()
    def turn(self, d: Tensor) -> None:
        """Set the basis to the first R left singular vectors of [P diag(values), d]; ignore a d that is not finite.

        With A = [P, d / |d|] and the eigenvectors of its Gram matrix, A^T A = V diag(w) V^T, the columns of
        A V diag(w)^-1/2 are orthonormal, so the SVD is that of a matrix of R + 1 rows. A is never stored: it is
        processed in blocks of rows, in double precision, with O(L R^2) operations and the memory of one block.

        A singular value of 0 has no unique direction. Here it is the remainder of P beside the other directions, the
        largest part first, which is the limit of small equal values in place of 0.
        """
        length = torch.linalg.vector_norm(d, dtype=torch.float64)
        if not length.isfinite() or length == 0:
            return
        kept, rank, unit = "values" in self.tensors(), self["basis"].shape[1], (d / length).to(d.dtype)
        values = self["values"].double() if kept else torch.ones(rank, dtype=torch.float64, device=d.device)
        reach = torch.ones_like(length) if self.delta == "normalised" else length
        with keys.one_thread():
            w, v = torch.linalg.eigh(self._gram(unit))
            root = w.clamp(min=0).sqrt()
            root, v = root[root > INSIDE], v[:, root > INSIDE]  # d adds no direction if it is inside already
            a = root.unsqueeze(1) * v.T  # coordinates of A in those columns
            u, s, _ = torch.linalg.svd(a * torch.cat([values, reach.unsqueeze(0)]))
            s = torch.where(s > NOTHING * s[0], s, 0)[:rank]
            found, old = u[:, :rank][:, s > 0], a[:, :rank]
            left = torch.linalg.svd(old - found @ (found.T @ old))[0]
            mix = (v / root) @ torch.cat([found, left], 1)[:, :rank]
            for rows, block in self._blocks(unit):
                rows.copy_(block @ mix)
        if kept:
            self["values"].copy_(s)


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """|P^T Q|_F^2: the number of common dimensions of two subspaces, independent of signs and rotations of a basis.

    >>> overlap(torch.eye(4)[:, :2], torch.eye(4)[:, [1, 0]]).item()
    2.0
    """
    return (one.T @ other).square().sum()
