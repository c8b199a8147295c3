"""fastText for classification (Joulin et al. 2017) as FedCP has it: the mean of word vectors, two linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedprism.config import positive, setting
from fedprism.models.base import MODELS, Block, Family


class Words(nn.Embedding):
    """A vector a word, and zeros for padding, which is word 0, whatever became of its row.

    Its row starts at zero and has no gradient of its own, but a method may pull at all weights, as FedSCE does.
    """

    def __init__(self, words: int, width: int) -> None:
        super().__init__(words, width, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.ne(0).unsqueeze(2)


class Mean(nn.Module):
    """Over all positions, padding too: `[batch, length, width]` to `[batch, width]`; a short text has a small mean."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


@MODELS.register("fasttext")
@dataclass(frozen=True)
class FastText(Family):
    """A vector a word, their mean, and two layers with nothing between them."""

    description: ClassVar[str] = "fastText for texts, as FedCP has it: the mean of word vectors, 2 linear layers"
    takes: ClassVar[str] = "texts"

    embedding: int = setting(32, "numbers in a word's vector", positive, "1 or more")
    hidden: int = setting(32, "outputs of the first fully connected layer, the features", positive, "1 or more")

    def blocks(self, classes: int, shape: tuple[int, ...]) -> list[Block]:
        _, words = shape
        return [
            ("embedding", Words(words, self.embedding)),
            ("mean", Mean()),
            ("fc1", nn.Linear(self.embedding, self.hidden)),
            ("fc2", nn.Linear(self.hidden, classes)),
        ]
