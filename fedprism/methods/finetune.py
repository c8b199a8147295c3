"""Fine-tuned FedAvg (FPE; Wang et al., 2019): before a test, each client trains the global model on its own data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedprism.config import positive, setting
from fedprism.errors import ConfigError
from fedprism.methods import register
from fedprism.methods.base import Client, Context, Method, Net, Pass, leaves


@register
@dataclass(frozen=True)
class FineTune(Method):
    id = "finetune"
    paper = "Wang et al., Federated Evaluation of On-device Personalization, arXiv 1910.10252, 2019"
    idea = "FedAvg; before it is tested, each client fine-tunes the global model on its own data."
    group = "fine-tuning"
    moment = "adapted"
    newcomers = "get the model and fine-tune it before they are tested, as all clients do"
    has_global = True

    epochs: int = setting(5, "epochs of fine-tuning before a test", lambda v: v >= 0, "0 or more")
    tunes: Literal["all", "head", "body"] = setting("all", "part of the model to fine-tune")
    lr: float | None = setting(
        None, "learning rate of fine-tuning, in every round; null: a tenth of train.optimizer.lr", positive, "above 0"
    )

    def adapt(self, client: Client, ctx: Context) -> list[Pass]:
        if self.epochs == 0:
            return []
        trains = None if self.tunes == "all" else trainable(client.model, self.tunes)
        rate = ctx.train.optimizer.lr / 10 if self.lr is None else self.lr
        return [Pass(self.loss, "tune", trains, self.epochs, optimizer={"lr": rate}, scheduled=False)]


def trainable(model: Net, part: str) -> leaves.Names:
    """The leaves of a part to train; refuses a part without weights."""
    found = leaves.part(model, part)
    if not found:
        raise ConfigError(
            f"the {part} is to be trained, but this model's has no weights; set model.head_layers to less."
        )
    return found
