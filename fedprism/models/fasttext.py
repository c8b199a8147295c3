"""fastText for classification (Joulin et al. 2017) as in FedCP: the mean of word vectors, two linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedprism.config import positive, setting
from fedprism.models.base import MODELS, Block, Family


class Words(nn.Embedding):
    """One vector per word, and always zeros for padding, which is word 0.

    The row of padding starts at zero and has no gradient, but a method such as FedSCE may change all weights.
    """

    def __init__(self, words: int, width: int) -> None:
        super().__init__(words, width, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.ne(0).unsqueeze(2)


class Mean(nn.Module):
    """The mean over all positions, padding included: `[batch, length, width]` to `[batch, width]`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


@MODELS.register("fasttext")
@dataclass(frozen=True)
class FastText(Family):
    """One vector per word, their mean, and two linear layers without activation."""

    description: ClassVar[str] = "fastText for texts, as in FedCP: the mean of word vectors, 2 linear layers"
    takes: ClassVar[str] = "texts"

    embedding: int = setting(32, "length of a word's vector", positive, "1 or more")
    hidden: int = setting(32, "outputs of the first fully connected layer, the features", positive, "1 or more")

    def blocks(self, classes: int, shape: tuple[int, ...]) -> list[Block]:
        _, words = shape
        return [
            ("embedding", Words(words, self.embedding)),
            ("mean", Mean()),
            ("fc1", nn.Linear(self.embedding, self.hidden)),
            ("fc2", nn.Linear(self.hidden, classes)),
        ]
