"""The server's part of a round: check what arrived, gather it and aggregate it.

Its optimisers are in `methods/server_optimizer.py`, its aggregators in `aggregators.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedprism.aggregators import AcceptedUpload, Aggregator
from fedprism.errors import FedprismError, some
from fedprism.methods.base import Context, Mean, Method, State, Upload, UploadKind
from fedprism.methods.states import (
    ChangedInPlace,
    WeightedSum,
    called,
    length,
    malformed,
    not_finite,
    rest_length,
    same_tensors,
    unchanged,
    update_length,
)
from fedprism.round.engine import Checked, Failure, Result
from fedprism.transforms.base import Transform, UploadContext, from_wire

FAR = 1000.0  # times the usual length: an update that is longer is refused
UNKNOWN = 1e6  # root mean square of an upload, where the server holds nothing but zeros to compare it with
LARGEST = 1e12  # length of what is no update, the buffers and scalars of an upload, or of what nothing compares with
# What a leaf may hold that the server has no type for.
NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16)


def accept(
    method: Method,
    transforms: Sequence[Transform],
    result: Result,
    kinds: Mapping[str, UploadKind],
    server: State,
    ctx: Context,
    limit: float,
) -> Checked | Failure:
    """A client's upload, decoded, or why it is refused: it cannot be decoded, is not what the method declares, has a
    wrong type or shape, is not finite or far too large, or is an update longer than `limit`. `ctx` is that client's."""
    wrong = malformed(result.upload)
    if wrong is not None:
        return Failure(wrong)
    try:
        with unchanged(f"{method.id}.decode", result.upload):
            upload = method.decode(dict(result.upload), ctx)
        if transforms:
            upload = from_wire(transforms, upload, UploadContext(ctx, kinds, method.origin(ctx)))
        wrong = malformed(upload) or _other_than_declared(upload, kinds, server)
    except (torch.OutOfMemoryError, ChangedInPlace):
        raise
    except Exception as error:  # noqa: BLE001 - whatever decoding makes of what somebody else has sent
        words = str(error).partition("\n")[0][:200]
        return Failure(f"its upload cannot be decoded: {type(error).__name__}: {words}")
    if wrong is not None:
        return Failure(wrong)
    found = result.checked  # the client's own check, if it has seen these very tensors
    if found is None or not same_tensors(found.upload, upload):
        bad = not_finite(upload)
        if bad is not None:
            return Failure(f"{bad} in its upload is not finite", non_finite=True)
        update, rest = update_length(upload, method.origin(ctx), kinds), rest_length(upload, kinds)
        found = Checked(upload, float(update), float(rest))
    if found.rest > LARGEST:
        reason = f"its buffers and scalars have length {found.rest:.3g}: the limit is {LARGEST:.3g}"
        return Failure(reason, non_finite=True)
    if found.length > limit:
        reason = f"its update has length {found.length:.3g}, far from what is usual: the limit is {limit:.3g}"
        return Failure(reason, non_finite=True)
    return found


def _other_than_declared(upload: State, kinds: Mapping[str, str], server: State) -> str | None:
    if upload.keys() != kinds.keys():
        odd = sorted(upload.keys() ^ kinds.keys())
        return f"its upload is not what the method declares: {', '.join(odd[:3])} missing or unknown"
    for name, tensor in upload.items():
        if name not in server and tensor.dtype not in NUMBERS:
            return f"{name} in its upload is {_kind(tensor)}, of which there is no mean"
        expected = server.get(name, tensor.new_empty(()) if kinds[name] == "scalar" else tensor)
        if (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
            return f"{name} in its upload is {_kind(tensor)}, expected {_kind(expected)}"
    return None


def _kind(tensor: object) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"{tensor!r}"[:40]


def longest_update(server: State, usual: float | None) -> float:
    """How long an update may be: `FAR` times the usual length, which in the first round is that of the server's
    weights. It may always be as long as these, so that a federation that hardly moves can begin to move again."""
    floats = {name: tensor for name, tensor in server.items() if tensor.is_floating_point()}
    weights, count = float(length(floats)), sum(tensor.numel() for tensor in floats.values())
    if not count:
        return LARGEST  # there is nothing to compare with
    if weights == 0:
        return FAR * max(usual or 0.0, UNKNOWN * math.sqrt(count))
    return FAR * weights if usual is None else max(FAR * usual, weights)


class RoundUploads:
    """The uploads of one round: added up as they come or, where the method or the aggregator needs all, kept.

    Weights are those of the clients that were asked (client -> training images). Where one of them gives nothing, the
    sum is rescaled once, at the end.
    """

    def __init__(
        self,
        method: Method,
        transforms: Sequence[Transform],
        aggregator: Aggregator,
        server: State,
        ctx: Context,
        asked: Mapping[str, int],
        usual: float | None,
    ) -> None:
        self.method, self.transforms, self.aggregator = method, transforms, aggregator
        self.server, self.ctx, self.asked = server, ctx, asked
        self.limit = longest_update(server, usual)
        self.weights = dict(zip(asked, ctx.shares(list(asked.values())), strict=True))
        self.keeps = method.needs_all_uploads or not aggregator.is_mean
        self.in_total = () if method.needs_all_uploads else tuple(method.totals(server, ctx))
        self.lengths: dict[str, float] = {}  # of the updates that were accepted, by client
        self.names: frozenset[str] | None = None  # of what the first client uploads
        self.kept: list[AcceptedUpload] = []
        self.sum, self.total = WeightedSum(), WeightedSum()  # `Mean.state` and `Mean.totals`

    def check(
        self, client_id: str, answer: Result, kinds: Mapping[str, UploadKind], ctx: Context
    ) -> AcceptedUpload | Failure:
        """A client's upload, for which there is memory now, or why it is refused. `ctx` is that client's."""
        if not self.method.needs_all_uploads:
            self._check_names(client_id, frozenset(kinds))
        found = accept(self.method, self.transforms, answer, kinds, self.server, ctx, self.limit)
        if isinstance(found, Failure):
            return found
        if not self.keeps:
            self.sum.reserve(found.upload)
            self.total.reserve({name: found.upload[name] for name in self.in_total})
        origin = {} if self.method.needs_all_uploads else self.method.origin(ctx)  # a download would wait for nobody
        return AcceptedUpload(found.upload, kinds, origin, found.length, self.weights[client_id])

    def _check_names(self, client_id: str, names: frozenset[str]) -> None:
        """Refuse a method that declares uploads of which there is no mean."""
        unknown = names - self.server.keys()
        if unknown:
            raise FedprismError(
                f"{self.method.id}: {client_id!r} uploads {some(sorted(unknown))}, which the server does not hold, so "
                "nobody knows of which type and shape they should be. Let `server` return them too, or override "
                "`aggregate`."
            )
        self.names = names if self.names is None else self.names
        if names != self.names:
            raise FedprismError(
                f"{self.method.id}: {client_id!r} uploads other names than the clients before it "
                f"({some(sorted(names ^ self.names))}), so there is no mean of them; override `aggregate`."
            )
        missing = set(self.in_total) - names
        if missing:
            raise FedprismError(
                f"{self.method.id}.totals names {some(sorted(missing))}, which {client_id!r} does not upload."
            )

    def add(self, client_id: str, sent: AcceptedUpload) -> None:
        """One more upload, in client order."""
        self.lengths[client_id] = sent.length
        if self.keeps:
            self.kept.append(sent)
        else:
            self.sum.add(sent.state, sent.weight)
            self.total.add({name: sent.state[name] for name in self.in_total}, 1 / len(self.ctx.info.clients))

    @property
    def usual_length(self) -> float:
        """The median length of the updates that were accepted."""
        return statistics.median(self.lengths.values())

    def aggregate(self) -> State:
        """What the method makes of the uploads."""
        method, server, ctx, clients = self.method, self.server, self.ctx, tuple(self.lengths)
        if method.needs_all_uploads:
            uploads = [Upload(c, self.asked[c], sent.state) for c, sent in zip(clients, self.kept, strict=True)]
            after = method.aggregate(server, uploads, ctx)
        else:
            after = method.combine(server, self._mean(clients), ctx)
        hook = "aggregate" if method.needs_all_uploads else "combine"
        if not isinstance(after, Mapping):
            raise FedprismError(f"{method.id}.{hook} returned {called(after)}; expected the server's next state.")
        if after.keys() != server.keys():
            changed = some(sorted(after.keys() ^ server.keys()))
            raise FedprismError(f"{method.id}.{hook} changed the server's keys: {changed}; they must stay constant.")
        return after

    def _mean(self, clients: tuple[str, ...]) -> Mean:
        arrived = math.fsum(self.weights[c] for c in clients)
        scale = 1.0 if len(clients) == len(self.weights) else 1 / arrived
        if not self.keeps:
            return Mean(clients, self.sum.result(scale), self.total.result())
        state = self._robust([replace(sent, weight=sent.weight * scale) for sent in self.kept], self.kept[0].state)
        plain = self._robust([replace(sent, weight=1 / len(clients)) for sent in self.kept], self.in_total)
        part = len(clients) / len(self.ctx.info.clients)  # a sum over all clients is so much of a plain mean
        return Mean(clients, state, {name: part * tensor for name, tensor in plain.items()})

    def _robust(self, kept: Sequence[AcceptedUpload], names: Collection[str]) -> State:
        """These leaves, as the aggregator merges them."""
        if not names:
            return {}
        uploads = [replace(sent, state={name: sent.state[name] for name in names}) for sent in kept]
        with torch.no_grad():
            merged = self.aggregator.aggregate(uploads)
        wrong = _difference(merged, uploads[0].state)
        if wrong is not None:
            raise FedprismError(
                f"server.aggregator {self.aggregator.id} must return names, types and shapes of the uploads, and "
                f"finite numbers: {wrong}."
            )
        return merged


def _difference(found: Any, expected: State) -> str | None:
    """How what an aggregator returned differs from an upload."""
    if not isinstance(found, Mapping):
        return f"it returned {called(found)}"
    for name in {**expected, **found}:
        given, wanted = (_kind(each[name]) if name in each else "nothing" for each in (found, expected))
        if given != wanted:
            return f"of {name} it returned {given}, expected {wanted}"
    bad = not_finite(dict(found))
    return None if bad is None else f"{bad} is not finite, though every upload is"
