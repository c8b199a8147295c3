"""FedKD (Wu et al., Nature Communications 2022): a local teacher and a shared student, whose updates are compressed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fedprism.config import Named, setting, share
from fedprism.methods import leaves, register
from fedprism.methods.base import Arch, Client, Context, Draw, Info, Net, Output, Parts
from fedprism.methods.factors import Updates, room
from fedprism.methods.mixed import one_for_all
from fedprism.methods.states import divergence
from fedprism.models import fresh


@register
@dataclass(frozen=True)
class FedKD(Updates):
    id = "fedkd"
    paper = (
        "Wu et al., Communication-Efficient Federated Learning via Knowledge Distillation, Nature Communications 2022"
    )
    idea = "A local teacher and a shared student teach each other; of the student's updates the main factors are sent."
    shares = "the student's updates, as factors of each matrix"
    stays = "the teacher, and the map between their features"
    group = "distillation"
    weighting = "uniform"
    shows = {
        "student": "the student alone",
        "kl": "how far the two models' predictions are from each other, both ways",
        "hidden": "squared distance of the teacher's features from the map of the student's",
    }

    lam: float = setting(1.0, "weight of the mutual distillation", lambda v: v >= 0, "0 or more")
    T_start: float = setting(0.95, "initial share of an update's energy to send", share, "0 to 1")
    T_end: float = setting(0.98, "the same in the last round; linear in between", share, "0 to 1")
    student: Named = setting(Named("smallest"), "the student's model; smallest: the smallest of the clients' models")

    mixed = True

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        small = self.student_arch(info)
        student, link = small.model(seed), fresh(lambda: nn.Linear(small.width, arch.width, bias=False), seed, "map")
        return Parts(teacher=arch.model(seed), student=student, map=link, received=room(student=student))

    def student_arch(self, info: Info) -> Arch:
        return one_for_all(self.student, "method.student", info)

    def facts(self, info: Info) -> Mapping[str, str]:
        return {"student": self.student_arch(info).words}

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "student")

    def energy(self, ctx: Context) -> float:
        return self.T_start + (self.T_end - self.T_start) * min(1.0, (ctx.round + 1) / ctx.rounds)

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        # A step on the sum is a step of each model on its own loss: targets and the divisor have no gradient.
        h_t, h_s = client.model.teacher.body(x), client.model.student.body(x)
        t, s = client.model.teacher.head(h_t), client.model.student.head(h_s)
        ce, kl = cross_entropy(t, y) + cross_entropy(s, y), divergence(s, t) + divergence(t, s)
        hidden = mse_loss(client.model.map(h_s), h_t)
        client.log("kl", kl)
        client.log("hidden", hidden)
        return ce + self.lam * (kl + hidden) / ce.detach().clamp(min=1e-6)  # also for a memorised batch

    def forward_details(self, model: Net, x: Tensor, draw: Draw) -> Output:
        return Output(model.teacher(x), branches={"student": model.student(x)})
