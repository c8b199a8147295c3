"""What methods are made of: states as flat dicts of tensors, modules side by side, distances, noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from fedprism.errors import FedprismError
from fedprism.methods.leaves import tensors

UPDATES = ("weights", "prototype", "factors")  # the kinds of leaves whose update is measured

K = TypeVar("K")
State = dict[str, Tensor]
Net = Any  # an nn.Module whose parts are reached by name, which torch's own types cannot follow


def average(states: Sequence[State], weights: Sequence[float]) -> State:
    """The weighted mean of states, leaf by leaf; whole-number counters are rounded.

    Summed in the order given (client order), so the bits do not depend on who finished first.
    """
    total = WeightedSum()
    for state, weight in zip(states, weights, strict=True):
        total.add(state, weight)
    return total.result()


class WeightedSum:
    """A weighted sum of states that are given one by one. It holds one state, however many are added."""

    def __init__(self) -> None:
        self.types: dict[str, torch.dtype] = {}
        self.totals: State = {}  # whole numbers are added up in double precision, floats of 16 bits in that of 32

    @torch.no_grad()
    def reserve(self, state: Mapping[str, Tensor]) -> None:
        """Take the memory for sums of such states: `add` needs next to none, so that it does not fail halfway."""
        if not self.types:
            self.totals = {name: torch.zeros_like(t, dtype=summed(t.dtype)) for name, t in state.items()}
            self.types = {name: tensor.dtype for name, tensor in state.items()}

    @torch.no_grad()
    def add(self, state: Mapping[str, Tensor], weight: float) -> None:
        """Add a state, all leaves at once: on a GPU, one kernel instead of one per leaf."""
        self.reserve(state)
        plain = [name for name, dtype in self.types.items() if dtype == summed(dtype)]
        if plain:
            torch._foreach_add_([self.totals[n] for n in plain], [state[n] for n in plain], alpha=weight)
        for name in self.types.keys() - set(plain):
            total = self.totals[name]
            total.add_(state[name].to(total.dtype) * weight)

    @torch.no_grad()
    def result(self, scale: float = 1.0) -> State:
        """The sum, times `scale`; whole-number counters are rounded."""
        names, sums = list(self.totals), list(self.totals.values())
        if scale != 1 and sums:
            sums = list(torch._foreach_mul(sums, scale))
        found = dict(zip(names, sums, strict=True))
        for name, dtype in self.types.items():
            if dtype != found[name].dtype:
                found[name] = (found[name] if dtype.is_floating_point else found[name].round()).to(dtype)
        return found


def summed(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers of a type are added up."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    return torch.float64


@torch.no_grad()
def load(model: Net, state: Mapping[str, Tensor]) -> None:
    """Copy a (partial) state into a model, in place; an unknown leaf or a wrong shape is an error."""
    own = tensors(model)
    for name, tensor in state.items():
        if name not in own or own[name].shape != tensor.shape:
            found = f"{tuple(own[name].shape)} here" if name in own else "not in this model"
            raise FedprismError(f"cannot load {name!r} of shape {tuple(tensor.shape)}: it is {found}.")
    copy_all([own[name] for name in state], list(state.values()))


@torch.no_grad()
def copy_all(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors, those of a type at once: on a GPU one kernel instead of one each."""
    types = [tensor.dtype for tensor in into]
    for dtype in set(types):
        places = [place for place, own in enumerate(types) if own == dtype]
        torch._foreach_copy_([into[i] for i in places], [tensors[i] for i in places], non_blocking=True)


@torch.no_grad()
def fill_nan(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors with NaN; whole numbers, which have none, with the smallest one, and flags with True."""
    floats = []
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            floats.append(tensor)
        else:
            tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)
    if floats:
        torch._foreach_add_(floats, math.nan)  # on a GPU, one kernel for all


def copy_of(state: State) -> State:
    """Copies of tensors, which the next client in the same slot cannot touch."""
    copies = [torch.empty_like(tensor, requires_grad=False) for tensor in state.values()]
    copy_all(copies, list(state.values()))
    return dict(zip(state, copies, strict=True))


@torch.no_grad()
def not_finite(state: State) -> str | None:
    """The first leaf that holds a NaN or an infinity."""
    floats = {name: t.detach() for name, t in state.items() if t.is_floating_point() and t.numel()}
    if not floats:
        return None
    # The smallest and the largest value in one pass: both are NaN if any value is. Floats of 8 bits have no order.
    wide = [tensor.float() if tensor.element_size() == 1 else tensor for tensor in floats.values()]
    ends = [torch.stack(torch.aminmax(tensor)).double().div(2).sum() for tensor in wide]
    finite = torch.stack(ends).isfinite().tolist()
    return next((name for name, fine in zip(floats, finite, strict=True) if not fine), None)


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Do both hold the very same tensors, by the same names?"""
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


class ChangedInPlace(FedprismError):
    """Somebody has changed a tensor that somebody else holds."""


@contextmanager
def unchanged(who: str, *states: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse to go on where these tensors of an upload were changed in place: a client's state, or the server's, may
    lie in the same memory."""
    # Tensors count their changes, but for those made in `torch.inference_mode()`, which nobody else holds.
    held = [tensor for state in states for tensor in state.values() if not tensor.is_inference()]
    before = [tensor._version for tensor in held]
    yield
    if [tensor._version for tensor in held] != before:
        raise ChangedInPlace(f"{who} changes tensors of an upload or of its download in place; it must make new ones.")


def malformed(upload: object) -> str | None:
    """Why this is no upload: a flat dict of dense tensors that hold values."""
    if not isinstance(upload, Mapping):
        return f"its upload is {called(upload)}, not a dict of tensors"
    for name, tensor in upload.items():
        if not isinstance(name, str):
            return f"{name!r} in its upload is {called(name)}, not the name of a leaf"
        if not isinstance(tensor, Tensor):
            return f"{name!r} in its upload is {called(tensor)}, not a tensor"
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            what = "has no values (device meta)" if tensor.is_meta else "is sparse, nested or packed"
            return f"{name!r} in its upload {what}; expected a dense tensor"
    return None


def called(thing: object) -> str:
    """What a message calls something that is not what it should be."""
    return "None" if thing is None else f"a {type(thing).__name__}"


def update_of(upload: Mapping[str, Tensor], origin: Mapping[str, Tensor]) -> State:
    """The upload minus what it is an update of. A leaf that `origin` does not have is an update already."""
    names = [name for name, tensor in upload.items() if name in origin and origin[name].shape == tensor.shape]
    moved = torch._foreach_sub([upload[n] for n in names], [origin[n] for n in names]) if names else ()
    return {**upload, **dict(zip(names, moved, strict=True))}


def added_to(origin: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> State:
    """The inverse of `update_of`."""
    return {n: origin[n] + u if n in origin and origin[n].shape == u.shape else u for n, u in update.items()}


@torch.no_grad()
def length(state: Mapping[K, Tensor]) -> Tensor:
    """The Euclidean length of all floating leaves together, not read yet; infinite where a square overflows."""
    floats = [tensor.detach() for tensor in measurable(state).values()]
    if not floats:
        return torch.zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(floats)).double())


def measurable(state: Mapping[K, Tensor], empty: bool = False) -> dict[K, Tensor]:
    """The floating leaves, without empty ones unless asked for, and without floats of 8 bits, which PyTorch cannot
    calculate with."""
    floats = {n: t for n, t in state.items() if t.is_floating_point() and t.element_size() > 1}
    return floats if empty else {n: t for n, t in floats.items() if t.numel()}


def update_length(upload: Mapping[str, Tensor], origin: Mapping[str, Tensor], kinds: Mapping[str, str]) -> Tensor:
    """The length of the update that an upload makes: its weights, prototypes and factors as one vector; not read yet.

    Without its buffers: statistics of batch norm grow with the square of what they see, and would hide long updates of
    weights.
    """
    measured = {n: t for n, t in measurable(upload).items() if kinds.get(n) in UPDATES}
    return length(update_of(measured, origin))


def rest_length(upload: Mapping[str, Tensor], kinds: Mapping[str, str]) -> Tensor:
    """The length of an upload's buffers and scalars, as they are, counters too, as one vector; not read yet."""
    rest = [tensor for name, tensor in upload.items() if kinds.get(name) not in UPDATES]
    counters = [tensor.flatten() for tensor in rest if not tensor.is_floating_point() and not tensor.is_complex()]
    if counters:
        rest.append(torch.cat(counters).double())
    return length(dict(enumerate(rest)))


def inherit(model: Net, personal: State) -> None:
    """Set a client's personal model; until `own.trained` is set, to the common one. Chosen on the device, without
    waiting."""
    trained, common = model.own["trained"], tensors(model.common)
    load(model.personal, {n: torch.where(trained, t, common[n]) for n, t in personal.items()})


def squared_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """|a - b|^2 over the leaves of b."""
    return torch.stack([(a[name] - anchor).square().sum() for name, anchor in b.items()]).sum()


def steered(value: Tensor, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensor:
    """A loss of this value that has these gradients."""
    return value.detach() + torch.stack([((w - w.detach()) * gradients[n]).sum() for n, w in weights.items()]).sum()


def divergence(target: Tensor, scores: Tensor) -> Tensor:
    """KL(target || scores) of predictions, both given as class scores `[batch, classes]`: the mean over images.

    The target has no gradient.
    """
    known = target.detach().log_softmax(1)
    return kl_div(scores.log_softmax(1), known, reduction="batchmean", log_target=True)


def gumbel(uniform: Tensor) -> Tensor:
    """Gumbel noise from uniform noise in [0, 1): -log(-log U), finite at both ends.

    >>> gumbel(torch.tensor([0.0, 0.5, 1 - 2**-24])).isfinite().all().item()
    True
    """
    return -(-uniform.clamp(1e-20, 1 - 2**-24).log()).log()


class Parts(nn.Module):
    """Named modules side by side: what `build` returns when a client owns more than one model."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Tensors(nn.Module):
    """Named tensors that are kept with a model but not trained: control variates, prototypes."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "/"), tensor.detach().clone())

    def __getitem__(self, name: str) -> Tensor:
        return self.get_buffer(name.replace(".", "/"))

    def tensors(self) -> State:
        return {name.replace("/", "."): tensor for name, tensor in self.named_buffers()}
