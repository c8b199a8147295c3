"""FML (Shen et al., 2020): a private model and the averaged "meme" model of each client teach each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism.config import Named, setting, share
from fedprism.methods import register
from fedprism.methods.base import Arch, Client, Context, Draw, Info, Method, Net, Parts, leaves
from fedprism.methods.mixed import one_for_all
from fedprism.methods.states import divergence


@register
@dataclass(frozen=True)
class FML(Method):
    id = "fml"
    paper = "Shen et al., Federated Mutual Learning, arXiv 2006.16765, 2020"
    idea = "A private model of any architecture and one averaged meme model teach each other on every batch."
    shares = "the meme model"
    stays = "the private model"
    group = "distillation"
    weighting = "uniform"
    has_global = True
    shows = {
        "kl/private": "how far the private model's prediction is from the meme's: KL(meme, private)",
        "kl/meme": "how far the meme's prediction is from the private model's: KL(private, meme)",
    }

    alpha: float = setting(0.5, "share of the labels in the private model's loss; the rest is the KL", share, "0 to 1")
    beta: float = setting(0.5, "share of the labels in the meme's loss; the rest is the KL", share, "0 to 1")
    meme: Named = setting(Named("smallest"), "the meme model; smallest: the smallest of the clients' models")

    mixed = True

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        return Parts(private=arch.model(seed), meme=self.meme_arch(info).model(seed))

    def meme_arch(self, info: Info) -> Arch:
        return one_for_all(self.meme, "method.meme", info)

    def facts(self, info: Info) -> Mapping[str, str]:
        return {"meme model": self.meme_arch(info).words}

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "meme")

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        # A step on the sum is a step of each model on its own loss, since targets have no gradient.
        private, meme = client.model.private(x), client.model.meme(x)
        return self.taught(client, "private", private, meme, y, self.alpha) + self.taught(
            client, "meme", meme, private, y, self.beta
        )

    def taught(self, client: Client, who: str, own: Tensor, other: Tensor, y: Tensor, labels: float) -> Tensor:
        """labels CE(own, y) + (1 - labels) KL(other || own)."""
        kl = divergence(other, own)
        client.log(f"kl/{who}", kl)
        return labels * cross_entropy(own, y) + (1 - labels) * kl

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.private(x)

    def predict_global(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.meme(x)
