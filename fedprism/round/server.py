"""The server's part of a round: check what arrived and aggregate it. Its optimisers: `methods/server_optimizer.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fedprism.errors import FedprismError
from fedprism.methods.base import Context, Method, State, Upload
from fedprism.methods.states import not_finite
from fedprism.round.engine import Failure, Result


def accept(method: Method, result: Result, declared: Mapping[str, str], server: State, ctx: Context) -> State | Failure:
    """A client's upload, decoded, or why it is refused: it cannot be decoded, is not what the method declares, has a
    wrong type or shape, or is not finite."""
    try:
        upload = method.decode(result.upload, ctx)
    except torch.OutOfMemoryError:
        raise
    except (FedprismError, RuntimeError, LookupError, ValueError, TypeError) as error:
        return Failure(f"its upload cannot be decoded: {type(error).__name__}: {error}")
    wrong = _check_kinds(upload, declared, server)
    if wrong is None and result.checked is not upload:  # else the client's own check has seen these very tensors
        bad = not_finite(upload)
        wrong = None if bad is None else Failure(f"{bad} in its upload is not finite", non_finite=True)
    return upload if wrong is None else wrong


def _check_kinds(upload: State, declared: Mapping[str, str], server: State) -> Failure | None:
    if upload.keys() != declared.keys():
        odd = sorted(upload.keys() ^ declared.keys())
        return Failure(f"its upload is not what the method declares: {', '.join(odd[:3])} missing or unknown")
    for name, tensor in upload.items():
        like = tensor.new_empty(()) if declared[name] == "scalar" else tensor
        expected = server.get(name, like)
        if (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
            return Failure(f"{name} in its upload is {_kind(tensor)}, expected {_kind(expected)}")
    return None


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def aggregate(method: Method, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
    """What the method makes of the uploads."""
    mean = method.aggregate(server, uploads, ctx)
    if mean.keys() != server.keys():
        changed = sorted(mean.keys() ^ server.keys())
        raise FedprismError(f"{method.id}.aggregate changed the server's keys: {changed[:3]}; they must stay constant.")
    return mean
