"""LG-FedAvg (Liang et al., 2020): the body is personal, the head is shared, after warm-up rounds of plain FedAvg."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from fedprism.config import setting
from fedprism.methods import register
from fedprism.methods.base import Method, Net, Now, State, Upload, leaves


@register
@dataclass(frozen=True)
class LGFedAvg(Method):
    id = "lg-fedavg"
    paper = "Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020"
    idea = "Body personal, head shared, trained jointly; both start from a FedAvg model of `warmup` rounds."
    shares = "the head (in the warm-up everything)"
    stays = "the body (after the warm-up)"
    group = "split"
    weighting = "uniform"

    warmup: int = setting(10, "rounds of FedAvg that give everyone the first model", lambda v: v >= 0, "0 or more")

    @property
    def mixed(self) -> bool:
        return self.warmup == 0

    def shared(self, model: Net, now: Now) -> Collection[str]:
        return leaves.everything(model) if now.round < self.warmup else leaves.part(model, "head")

    # The averaged body must reach every client once after the warm-up, however late it is sampled: the server
    # remembers who has trained since then, and sends the whole model to those who have not.
    def server(self, model: Net, now: Now) -> State:
        return {**super().server(model, now), "started": torch.zeros(len(now.info.clients), dtype=torch.bool)}

    def send(self, server: State, client: str | None, now: Now) -> State:
        has_body = client is not None and bool(server["started"][now.info.clients.index(client)])
        return {n: t for n, t in server.items() if n != "started" and (n in now.shared or not has_body)}

    def aggregate(self, server: State, uploads: Sequence[Upload], now: Now) -> State:
        started = server["started"].clone()
        if now.round >= self.warmup:
            started[[now.info.clients.index(upload.client) for upload in uploads]] = True
        return {**super().aggregate(server, uploads, now), "started": started}
