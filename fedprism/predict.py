"""Prediction: the clients' models of a run, and what each one says of images or texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedprism.config import Config
from fedprism.data import agnews
from fedprism.data.images import normalise
from fedprism.data.pictures import DAMAGED, read_picture, reason
from fedprism.engines.numerics import numerics
from fedprism.errors import ConfigError, DataError, FedprismError, RecordError, some
from fedprism.federation import ClientData, Federation, Split, build_federation
from fedprism.methods.base import Draw, Info, Method
from fedprism.methods.base import load as load_state
from fedprism.methods.leaves import tensors
from fedprism.methods.server_optimizer import method_part
from fedprism.records import RunDirectory, RunRecord
from fedprism.round.client import Job, client_model, make_context, make_info
from fedprism.round.events import Snapshot
from fedprism.round.noise import keyed_draw

AT_ONCE = 256  # images that a model predicts at a time


class ClientModels(Mapping[str, "ClientModel"]):
    """The clients' models by client, from the checkpoint of the best round. Each is made when it is asked for."""

    def __init__(self, path: Path, record: RunRecord, method: Method, federation: Federation | None = None) -> None:
        self._path, self._config, self._method, self._federation = path, record.config, method, federation
        self._digests = dict(record.info.get("images", {}))  # of clients whose images have not been compared yet
        self._info = make_info(self._config, record.clients, len(record.class_names), record.shape)
        self._class_names = record.class_names
        self._lost: list[str] = []
        with RunDirectory.open(path) as directory:
            snapshot = directory.best(self._lost)
        if snapshot is None:
            raise RecordError(f"{path} holds no checkpoint yet; its models are there after the first one.")
        self.snapshot: Snapshot = snapshot

    def __getitem__(self, client_id: str) -> ClientModel:
        if client_id not in self._info.archs:
            raise KeyError(f"there is no client {client_id!r}; there are {', '.join(self._info.clients)}.")
        if client_id in self._lost:
            raise RecordError(
                f"the state of client {client_id!r} in {self._path}'s checkpoint of round {self.snapshot.round} is "
                "damaged. The other clients' models can be used; to have this one, restore its file from a copy."
            )
        data = self._data(client_id) if self._method.moment == "adapted" else None
        return ClientModel.of(self._method, self._config, self._info, self._class_names, self.snapshot, client_id, data)

    def _data(self, client_id: str) -> Federation:
        """The images of the run, to adapt a model on."""
        again = f"give them to fp.load({str(self._path)!r}, federation=...)"
        if self._federation is None:
            try:
                self._federation = build_federation(self._config.data, self._config.seed)
            except (ConfigError, DataError) as error:
                raise DataError(
                    f"{self._method.id} adapts a model to its client's images before it is tested, and the images of "
                    f"this run cannot be read again. To have its models, {again}. The reason: {error}"
                ) from error
        given = self._federation.clients.get(client_id)
        if given is None or (client_id in self._digests and given.digest() != self._digests[client_id]):
            wrong = "are not there" if given is None else f"are not the ones that {self._path} was run with"
            raise RecordError(
                f"{self._method.id} adapts a model to its client's images before it is tested, but those of "
                f"{client_id!r} {wrong}; {again}."
            )
        self._digests.pop(client_id, None)
        return self._federation

    def __iter__(self) -> Iterator[str]:
        return iter(self._info.clients)

    def __len__(self) -> int:
        return len(self._info.clients)


@dataclass(frozen=True)
class ClientModel:
    """One client's model, ready to predict."""

    client_id: str
    method: Method
    module: nn.Module
    config: Config
    info: Info
    class_names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        method: Method,
        config: Config,
        info: Info,
        class_names: tuple[str, ...],
        snapshot: Snapshot,
        client_id: str,
        federation: Federation | None = None,
    ) -> ClientModel:
        """The client's model at its method's own moment: as received, as it left local training, or adapted to the
        client's images. Only an adaptation needs the federation."""
        arch = info.archs[client_id]
        module = method.build(arch, client_id, info, info.seed)
        state = snapshot.clients[client_id]
        if method.moment != "trained" or state is None:
            ctx = make_context(method, config, info, module, snapshot.round).replace(client_id=client_id)
            download = method.encode(method.send(method_part(snapshot.server), client_id, ctx), ctx)
            if federation is None:
                nothing = Split(_as_inputs((), arch.shape), torch.empty(0, dtype=torch.int64))
                data = ClientData(client_id, client_id, nothing, nothing, nothing, info.classes)
                state = client_model(Job(method, config, info, data, snapshot.round), state, download)
            else:
                job = Job(method, config, info, federation.clients[client_id], snapshot.round, federation.public)
                run = replace(config.run, precision="bf16" if config.run.precision == "bf16" else "fp32")  # on a CPU
                with numerics(run, torch.device("cpu")):
                    state = client_model(job, state, download, adapted=True)
        lost = tensors(module).keys() - state.keys()
        if lost:
            raise FedprismError(
                f"{method.id} is tested as clients leave training, but {client_id!r} has not stored "
                f"{some(sorted(lost))} of that model. Let `stored` name every leaf to have these models."
            )
        load_state(module, state)
        return cls(client_id, method, module.eval(), config, info, class_names)

    @torch.no_grad()
    def probabilities(self, images: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Class probabilities `[n, classes]` of uint8 images, `[n, height, width, channels]` or channels first; or of
        texts, given as strings or as tokens `[n, length]`."""
        scores = [self.method.predict(self.module, x, draw) for x, draw in self._batches(images)]
        return torch.cat(scores).softmax(1).numpy() if scores else np.empty((0, self.info.classes), np.float32)

    @torch.no_grad()
    def diagnostics(self, images: Any) -> dict[str, np.ndarray[Any, Any]]:
        """What the method reports of its inside per image: arrays `[n, ...]` by name, such as FedPick's `selected`.

        The scores of a branch by itself are there as `scores/<branch>`. A method that reports nothing gives an empty
        dict.
        """
        found: dict[str, list[Tensor]] = {}
        for x, draw in self._batches(images):
            output = self.method.forward_details(self.module, x, draw)
            branches = {f"scores/{name}": scores for name, scores in output.branches.items()}
            for name, values in {**branches, **output.means, **output.quantiles}.items():
                found.setdefault(name, []).append(values)
        return {name: torch.cat(values).numpy() for name, values in found.items()}

    def _batches(self, images: Any) -> Iterator[tuple[Tensor, Draw]]:
        """Images or texts as the model takes them, with the noise of each batch."""
        shape = self.info.archs[self.client_id].shape
        if isinstance(images, str) and len(shape) == 2:
            raise DataError(f"{images[:40]!r} is one text; give a list: [{images[:40]!r}].")
        if len(shape) == 2 and isinstance(images, Sequence) and images and all(isinstance(x, str) for x in images):
            images = agnews.encode(images, self.config.data)
        x = normalise(_as_inputs(images, shape), self.config.data.normalize)
        for step, batch in enumerate(torch.split(x, AT_ONCE) if len(x) else ()):
            yield batch, keyed_draw(None, self.info.seed, "serve", self.client_id, step)

    def predict_files(self, paths: Sequence[str | Path]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The most probable class of each image file. Files are read as `folder:PATH` reads them."""
        shape, images = self.info.archs[self.client_id].shape, []
        if len(shape) != 3:
            raise DataError("this model takes texts, not image files; give their tokens to `predict`.")
        size = shape[-1]
        for path in map(Path, paths):
            try:
                images.append(read_picture(path, size))
            except DAMAGED as error:
                raise DataError(f"{path} cannot be read: {reason(error)}.") from error
        return self.predict(np.stack(images) if images else np.empty((0, 3, size, size), np.uint8))

    def predict(self, images: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The most probable class of each image, as an index into `class_names`."""
        result: np.ndarray[Any, np.dtype[np.int64]] = self.probabilities(images).argmax(1)
        return result


def _as_inputs(given: Any, shape: tuple[int, ...]) -> Tensor:
    """Images as uint8 `[n, channels, height, width]`, or tokens as int32 `[n, length]`."""
    try:
        x = given if isinstance(given, Tensor) else torch.as_tensor(np.array(given))
    except (TypeError, ValueError) as error:
        if len(shape) == 2:
            raise DataError("expected a list of texts (str), or their tokens as an array of whole numbers.") from error
        raise DataError(f"images cannot be made an array: {error}. For files use `predict_files`.") from error
    if x.ndim and not len(x):
        return torch.empty(0, *shape, dtype=torch.uint8) if len(shape) == 3 else torch.empty(0, shape[0]).int()
    return _as_images(x, shape) if len(shape) == 3 else _as_tokens(x, *shape)


def _as_tokens(x: Tensor, length: int, words: int) -> Tensor:
    if x.is_floating_point() or x.dtype == torch.bool or x.ndim != 2 or x.shape[1] != length:
        raise DataError(f"texts are {x.dtype} {tuple(x.shape)}; expected whole numbers [n, {length}]: their tokens.")
    if int(x.min()) < 0 or int(x.max()) >= words:
        raise DataError(f"tokens reach from {int(x.min())} to {int(x.max())}; expected 0 to {words - 1}.")
    return x.to(torch.int32)


def _as_images(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    channels, height, width = shape
    if x.dtype != torch.uint8:
        raise DataError(f"images are {x.dtype}; expected uint8 from 0 to 255, as they are in a file.")
    if x.ndim == 4 and tuple(x.shape[1:]) == shape:
        return x
    if x.ndim == 4 and tuple(x.shape[1:]) == (height, width, channels):
        return x.permute(0, 3, 1, 2).contiguous()
    raise DataError(
        f"images have shape {tuple(x.shape)}; expected [n, {height}, {width}, {channels}], or the channels first."
    )
