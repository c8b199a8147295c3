"""Measure how much the clients of a federation differ: class shares, sizes and the look of their images.

Label skew and sizes are counted over all training images. Feature skew is measured on a keyed sample of them, in two
ways. Both compare images of the same class only, so that label skew does not count as feature skew:

- A logistic regression predicts an image's client from downscaled pixels and simple statistics of colour and texture
  (texts: counts of frequent words), minus the class mean. In each class all clients have the same weight, so a guess
  from the class alone has the accuracy `chance`.
- The distance of first-layer statistics: each image's mean and standard deviation per channel of a fixed random
  convolution (texts: the mean of fixed random word vectors), averaged by client and class. The difference of two
  clients is the mean over their common classes, in standard deviations of images of one client and class. The expected
  chance difference is subtracted from its square; the result is the root of the mean over pairs.

If several clients share each domain, domains are compared instead of clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedprism import keys
from fedprism.federation.base import Federation

MAX_CLIENTS = 20  # clients to compare
SAMPLE = 2000  # maximum number of images to compare
_CELL = 10  # images per client and class that the sample aims at
_MIN_IMAGES = 2  # of a class, for a client to be compared in it
_FOLDS = 3
_CHANNELS = 16  # of the random first layer
_WORDS = 500  # frequent words as features of a text
_CHUNK = 256  # images at a time

Array = NDArray[np.float64]
Numbers = NDArray[np.int64]

# Words by lower thresholds: of the mean total variation, and of the pairwise accuracy, which does not depend on the
# number of clients.
SHARED = {0.0: "evenly", 0.1: "slightly unevenly", 0.2: "unevenly", 0.5: "very unevenly"}
AS_CHANCE = 1.25  # up to this multiple of a random partition's value, shares are as even as by chance
DIFFER = {0.0: "look alike", 0.55: "differ slightly", 0.7: "differ clearly", 0.9: "differ strongly"}


@dataclass(frozen=True)
class FeatureSkew:
    """How much images of the same class differ between clients."""

    what: str  # clients or domains
    compared: int  # number of compared ones
    of: int  # their total number
    images: int  # size of the sample
    accuracy: float  # of a classifier that knows the class, with equal weight per client in each class
    chance: float  # accuracy of a guess from the class alone
    pairs: float  # mean accuracy of choosing between the right client and one other; chance is 0.5
    distance: float  # of first-layer statistics, in standard deviations of images of one client and class


@dataclass(frozen=True)
class Description:
    """Measurements of a federation; `str` returns them as a sentence."""

    clients: int
    classes: int
    inputs: str  # images or texts
    smallest: int  # training images of the smallest client
    largest: int  # training images of the largest client
    variation: float  # coefficient of variation of the clients' sizes
    gini: float  # Gini coefficient of the sizes; 0: all equal
    total_variation: float  # between a client's class shares and those of all clients, mean over clients; 0 to 1
    by_chance: float  # the same for a random partition with these sizes
    jensen_shannon: float  # Jensen-Shannon divergence of the same shares, in bits; 0 to 1
    classes_per_client: float  # mean
    features: FeatureSkew | None
    unmeasured: str = ""  # why feature skew was not measured

    def numbers(self) -> dict[str, float]:
        """All measurements by name."""
        named = {
            "clients": self.clients,
            "classes": self.classes,
            f"fewest training {self.inputs} of a client": self.smallest,
            f"most training {self.inputs} of a client": self.largest,
            "sizes: coefficient of variation": self.variation,
            "sizes: Gini coefficient": self.gini,
            "classes of a client, mean": self.classes_per_client,
            "label skew: total variation, mean": self.total_variation,
            "label skew: total variation of random dealing": self.by_chance,
            "label skew: Jensen-Shannon divergence in bits, mean": self.jensen_shannon,
        }
        if (skew := self.features) is not None:
            named |= {
                f"feature skew: {self.inputs} looked at": skew.images,
                f"feature skew: accuracy of telling {skew.what} apart": skew.accuracy,
                "feature skew: accuracy by chance": skew.chance,
                f"feature skew: accuracy of telling two {skew.what} apart, chance 0.5": skew.pairs,
                "feature skew: distance of first-layer statistics": skew.distance,
            }
        return named

    def __str__(self) -> str:
        sizes = f"{self.smallest:,}" if self.smallest == self.largest else f"{self.smallest:,} to {self.largest:,}"
        if self.clients == 1:
            return f"1 client of {sizes} training {self.inputs}: there is nothing to compare it with."
        uneven = self.total_variation > AS_CHANCE * self.by_chance
        word = _word(SHARED, self.total_variation)
        shared = word if uneven or word == SHARED[0] else "as evenly as by chance"
        labels = f"classes are shared {shared} (total variation {self.total_variation:.2f})"
        if (skew := self.features) is None:
            looks = f"whether {self.inputs} differ cannot be said: {self.unmeasured}"
        else:
            whom = skew.what if skew.compared == skew.of else f"{skew.compared} of the {skew.of} {skew.what}"
            looks = (
                f"{self.inputs} {_word(DIFFER, skew.pairs)} (a classifier tells {whom} apart with "
                f"{100 * skew.accuracy:.0f} %, chance {100 * skew.chance:.0f} %)"
            )
        each = " each" if self.smallest == self.largest else ""
        return f"{self.clients} clients of {sizes} training {self.inputs}{each}: {labels}, {looks}."


def describe(federation: Federation) -> Description:
    """Measure a federation's label skew, size imbalance and feature skew; the result is deterministic.

    >>> import numpy as np
    >>> grey = {name: np.full((20, 1, 8, 8), level, dtype=np.uint8) for name, level in (("dark", 50), ("light", 90))}
    >>> y = np.arange(20) % 2
    >>> print(describe(Federation.from_arrays({name: (x, y) for name, x in grey.items()})))
    2 clients of 14 training images each: classes are shared evenly (total variation 0.00), images differ strongly \
(a classifier tells clients apart with 100 %, chance 50 %).
    """
    counts = np.stack([client.class_counts().cpu().numpy() for client in federation.clients.values()])
    sizes = counts.sum(1)
    shares, pooled = counts / sizes[:, None], counts.sum(0) / counts.sum()
    found, why = _feature_skew(federation, counts)
    return Description(
        clients=len(counts),
        classes=counts.shape[1],
        inputs="texts" if len(federation.shape) == 2 else "images",
        smallest=int(sizes.min()),
        largest=int(sizes.max()),
        variation=float(sizes.std() / sizes.mean()),
        gini=_gini(sizes),
        total_variation=_total_variation(shares, pooled),
        by_chance=_dealt_at_random(counts, federation.seed),
        jensen_shannon=_jensen_shannon(shares, pooled),
        classes_per_client=float((counts > 0).sum(1).mean()),
        features=found,
        unmeasured=why,
    )


def _word(words: Mapping[float, str], value: float) -> str:
    """The word of the highest threshold that is reached.

    >>> _word(SHARED, 0.1), _word(SHARED, 0.7)
    ('slightly unevenly', 'very unevenly')
    """
    return words[max(threshold for threshold in words if value >= threshold)]


# --- counts ----------------------------------------------------------------------------------------------------------


def _gini(sizes: Numbers) -> float:
    """The Gini coefficient: half the mean difference of two sizes, relative to the mean size.

    >>> _gini(np.array([5, 5])), _gini(np.array([1, 3]))
    (0.0, 0.25)
    """
    return float(np.abs(sizes[:, None] - sizes[None]).mean() / (2 * sizes.mean()))


def _total_variation(shares: Array, pooled: Array) -> float:
    return float(np.abs(shares - pooled).sum(1).mean() / 2)


def _jensen_shannon(shares: Array, pooled: Array) -> float:
    middle = (shares + pooled) / 2

    def relative(p: Array) -> Array:
        """Kullback-Leibler divergence from the middle, in bits; zero shares add nothing."""
        ratio = np.divide(p, middle, out=np.ones_like(middle), where=p > 0)
        return np.asarray((p * np.log2(ratio)).sum(1))

    divergence = (relative(shares) + relative(np.broadcast_to(pooled, shares.shape))) / 2
    return float(divergence.mean().clip(0, 1))


def _dealt_at_random(counts: Numbers, seed: int) -> float:
    """The mean total variation of a random partition with these sizes."""
    rng = keys.numpy_generator(seed, "describe", "random")
    together, draws = counts.sum(0), max(1, 200 // len(counts))
    found = []
    for size in counts.sum(1):
        dealt = rng.multivariate_hypergeometric(together, size, draws, method="marginals")
        found.append(_total_variation(dealt / size, together / together.sum()))
    return float(np.mean(found))


# --- features --------------------------------------------------------------------------------------------------------


def _feature_skew(federation: Federation, counts: Numbers) -> tuple[FeatureSkew | None, str]:
    """The measurement, or the reason why there is none."""
    if len(counts) == 1:
        return None, "there is one client"
    rng = keys.numpy_generator(federation.seed, "describe", "sample")
    every = list(federation.clients.values())
    domains = list(dict.fromkeys(client.domain for client in every))
    chosen = _chosen([client.domain for client in every], rng)
    by_domain = 1 < len(domains) < len(every)
    what, of = ("domains", len(domains)) if by_domain else ("clients", len(every))
    groups = {i: domains.index(every[i].domain) if by_domain else i for i in chosen}

    # The training images of the chosen clients: client, class and row.
    owner = np.concatenate([np.full(len(every[i].train), i) for i in chosen])
    label = np.concatenate([every[i].train.y.cpu().numpy() for i in chosen])
    row = np.concatenate([np.arange(len(every[i].train)) for i in chosen])
    group = np.vectorize(groups.__getitem__, otypes=[np.int64])(owner)
    taken = _sample(group, label, rng)
    if not len(taken):
        return None, f"no two {what} have {_MIN_IMAGES} training {_inputs(federation)} of one class each"
    owner, label, row, group = owner[taken], label[taken], row[taken], group[taken]

    with keys.one_thread(), torch.no_grad():
        seen, layer = _features(federation, owner, row)
    accuracies, compared = _classify(seen, group, label, rng), len(np.unique(group))
    return FeatureSkew(what, compared, of, len(taken), *accuracies, _distance(layer, group, label)), ""


def _chosen(domains: Sequence[str], rng: np.random.Generator) -> list[int]:
    """Up to `MAX_CLIENTS` clients, drawn equally from all domains."""
    turns: list[tuple[int, int, int]] = []
    seen: dict[str, int] = {}
    for position, one in enumerate(rng.permutation(len(domains)).tolist()):
        seen[domains[one]] = seen.get(domains[one], 0) + 1
        turns.append((seen[domains[one]], position, one))
    return sorted(one for _, _, one in sorted(turns)[:MAX_CLIENTS])


def _inputs(federation: Federation) -> str:
    return "texts" if len(federation.shape) == 2 else "images"


def _sample(group: Numbers, label: Numbers, rng: np.random.Generator) -> Numbers:
    """Up to `SAMPLE` images of classes that at least two groups have, those of most groups first; with the same limit
    per group and class."""
    order = rng.permutation(len(group))
    cells: dict[int, list[Numbers]] = {}
    for one in np.unique(label):
        members = [order[(label[order] == one) & (group[order] == g)] for g in np.unique(group[label == one])]
        enough = [cell for cell in members if len(cell) >= _MIN_IMAGES]
        if len(enough) > 1:
            cells[int(one)] = enough
    taken: list[Numbers] = []
    mixed = rng.permutation(np.array(sorted(cells), dtype=np.int64)).tolist()
    for one in sorted(mixed, key=lambda one: -len(cells[one])):
        if taken and (len(taken) + len(cells[one])) * _CELL > SAMPLE:
            break
        taken += cells[one]
    limit = max(_MIN_IMAGES, SAMPLE // max(1, len(taken)))
    return np.sort(np.concatenate([cell[:limit] for cell in taken])) if taken else np.empty(0, dtype=np.int64)


def _features(federation: Federation, owner: Numbers, row: Numbers) -> tuple[Array, Array]:
    """Features for the classifier and first-layer statistics: [n, features] and [n, statistics]."""
    every, found = list(federation.clients.values()), []
    for one in np.unique(owner):
        rows = torch.from_numpy(row[owner == one])
        train = every[one].train
        for part in torch.split(rows, _CHUNK):
            found.append(train.batch(part.to(train.y.device)).cpu())
    order = np.argsort(np.argsort(owner, kind="stable"))  # back from the order by client
    if len(federation.shape) == 2:
        seen, layer = _of_texts(torch.cat(found), federation.shape[1])
    else:
        parts = [_of_images(images) for images in found]
        seen, layer = (torch.cat(column) for column in zip(*parts, strict=True))
    return seen.double().numpy()[order], layer.double().numpy()[order]


def _of_images(images: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels at 8x8, mean and deviation per channel, and differences to neighbours, which are large with noise."""
    x = images.float() / 255
    channels, height, width = x.shape[1:]
    small = F.adaptive_avg_pool2d(x, (min(8, height), min(8, width))).flatten(1)
    padded = F.pad(x, (1, 1, 1, 1), mode="replicate")
    across, down = padded[..., 1:-1, 1:] - padded[..., 1:-1, :-1], padded[..., 1:, 1:-1] - padded[..., :-1, 1:-1]
    curved = across[..., 1:] - across[..., :-1] + down[..., 1:, :] - down[..., :-1, :]
    texture = torch.cat([part.abs().mean((2, 3)) for part in (across, down, curved)], 1)
    spread = x.std((2, 3), correction=0)
    seen = torch.cat([small, x.mean((2, 3)), spread, (texture + 1e-3).log()], 1)

    kernel = torch.randn(_CHANNELS, channels, 3, 3, generator=keys.generator("describe", "layer", channels))
    kernel /= kernel.flatten(1).norm(dim=1)[:, None, None, None]
    out = F.conv2d(padded, kernel, stride=(max(1, height // 32), max(1, width // 32)))
    return seen, torch.cat([out.mean((2, 3)), out.std((2, 3), correction=0)], 1)


def _of_texts(tokens: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Counts of the most frequent words, and the mean of fixed random word vectors; 0 is padding."""
    tokens = tokens.long()
    frequent = torch.bincount(tokens.flatten(), minlength=words)
    frequent[0] = 0
    order = torch.argsort(frequent, descending=True, stable=True)[:_WORDS]
    column = torch.full((words,), len(order))
    column[order] = torch.arange(len(order))
    counted = torch.zeros(len(tokens), len(order) + 1)
    counted.scatter_add_(1, column[tokens], torch.ones_like(tokens, dtype=counted.dtype))
    vectors = torch.randn(words, _CHANNELS, generator=keys.generator("describe", "words", words))
    there = (tokens > 0).unsqueeze(2)
    mean = torch.cat(
        [(vectors[part] * mask).sum(1) / mask.sum(1).clamp(min=1) for part, mask in _chunks(tokens, there)]
    )
    return counted[:, :-1].log1p(), mean


def _chunks(*tensors: Tensor) -> Sequence[tuple[Tensor, ...]]:
    return list(zip(*(torch.split(tensor, _CHUNK) for tensor in tensors), strict=True))


def _classify(seen: Array, group: Numbers, label: Numbers, rng: np.random.Generator) -> tuple[float, float, float]:
    """Cross-validate a classifier of groups that knows the class: its accuracy, chance, and pairwise accuracy."""
    from sklearn.linear_model import LogisticRegression

    groups, group = np.unique(group, return_inverse=True)
    classes, label = np.unique(label, return_inverse=True)
    counts = np.zeros((len(classes), len(groups)), dtype=np.int64)
    np.add.at(counts, (label, group), 1)
    fold = np.empty(len(group), dtype=np.int64)
    for one, other in zip(*counts.nonzero(), strict=True):
        members = np.flatnonzero((label == one) & (group == other))
        fold[members] = (np.arange(len(members)) + rng.integers(_FOLDS)) % _FOLDS
    right, pairs = np.empty(len(group)), np.empty(len(group))
    for number in range(_FOLDS):
        train, test = fold != number, fold == number
        weight = _weights(group[train], label[train], counts.shape)
        x = seen - _class_means(seen[train], label[train], weight)[label]
        scale = np.sqrt(np.average(x[train] ** 2, axis=0, weights=weight))
        x = x / np.where(scale > 1e-6, scale, 1.0)
        model = LogisticRegression(C=0.1, max_iter=200, tol=1e-3)
        model.fit(x[train], group[train], sample_weight=weight)
        scores = x[test] @ model.coef_.T + model.intercept_
        if scores.shape[1] == 1:  # two groups: the score of the second
            scores = np.concatenate([-scores, scores], 1)
        possible = np.where(counts[label[test]] > 0, scores, -np.inf)  # without groups that lack the class
        own = np.take_along_axis(scores, group[test][:, None], 1)
        others = (counts[label[test]] > 0).sum(1) - 1
        right[test] = possible.argmax(1) == group[test]
        pairs[test] = ((possible < own) & (possible > -np.inf)).sum(1) / others
    weight = _weights(group, label, counts.shape)
    chance = 1 / (counts > 0).sum(1)[label]
    accuracy, guessed, of_two = (float(np.average(each, weights=weight)) for each in (right, chance, pairs))
    return accuracy, guessed, of_two


def _weights(group: Numbers, label: Numbers, shape: tuple[int, int]) -> Array:
    """One weight per image: equal totals per group within a class, and a class weighs as much as its images."""
    counts = np.zeros(shape)
    np.add.at(counts, (label, group), 1)
    share = counts.sum(1) / np.maximum((counts > 0).sum(1), 1)
    return np.asarray(share[label] / counts[label, group])


def _class_means(seen: Array, label: Numbers, weight: Array) -> Array:
    """The weighted mean of each class: [classes, features]."""
    total = np.zeros((int(label.max()) + 1, seen.shape[1]))
    np.add.at(total, label, seen * weight[:, None])
    return np.asarray(total / np.bincount(label, weights=weight)[:, None])


def _distance(vectors: Array, group: Numbers, label: Numbers) -> float:
    """Root mean square difference of pairs of groups, in standard deviations within a group and class.

    Two groups whose means differ by 4, with deviation 1:

    >>> numbers = np.array([[0.0], [2.0]] * 50 + [[4.0], [6.0]] * 50)
    >>> round(_distance(numbers, np.repeat([0, 1], 100), np.zeros(200, dtype=int)), 1)
    4.0
    """
    groups, group = np.unique(group, return_inverse=True)
    classes, label = np.unique(label, return_inverse=True)
    shape = (len(groups), len(classes))
    counts, mean = np.zeros(shape), np.zeros((*shape, vectors.shape[1]))
    np.add.at(counts, (group, label), 1)
    np.add.at(mean, (group, label), vectors)
    mean /= np.maximum(counts, 1)[..., None]
    within = ((vectors - mean[group, label]) ** 2).sum(0) / max(1, len(vectors) - int((counts > 0).sum()))
    mean /= np.maximum(np.sqrt(within), 1e-3)  # keeps the distance of constant images finite
    found = []
    for one, other in combinations(range(len(groups)), 2):
        both = (counts[one] > 0) & (counts[other] > 0)
        if not both.any():
            continue
        noise = 1 / counts[one, both] + 1 / counts[other, both]  # variance of each class's difference
        weight = (1 / noise) / (1 / noise).sum()
        difference = weight @ (mean[one, both] - mean[other, both])
        found.append(float((difference**2).mean() - weight**2 @ noise))
    return float(np.sqrt(max(0.0, float(np.mean(found)))))
