"""Personalised federated learning in one file, without the package: FedAvg, FedBN and training alone.

    python examples/one_file_fedavg.py

Five clients hold real handwritten digits, each drawn with ink and paper of another brightness. Every round a client
trains the received model on its own images; the server averages what comes back. FedBN is the same, but batch-norm
layers stay at home.
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

CLIENTS, ROUNDS, BATCH, LR = 5, 20, 16, 0.05


def make_clients(seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each client's training and test images, with a contrast and a background of its own."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    clients = []
    for i, rows in enumerate(order.chunk(CLIENTS)):
        styled = x[rows] * (1 - 0.2 * i) + 0.5 * i
        clients.append((styled[:60], y[rows][:60], styled[60:], y[rows][60:]))
    return clients


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, order: torch.Generator) -> None:
    """One local epoch."""
    optimiser = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    model.train()
    for rows in torch.randperm(len(x), generator=order).split(BATCH):
        optimiser.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()


def shared_leaves(model: nn.Module, method: str) -> list[str]:
    """What travels: nothing, everything, or everything but batch norm (found by its type, not by its name)."""
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    keep = {"local": [""], "fedavg": [], "fedbn": [f"{name}." for name in norms]}[method]
    return [leaf for leaf in model.state_dict() if not leaf.startswith(tuple(keep))]


def run(method: str) -> float:
    """Mean accuracy over the clients after the last round."""
    clients = make_clients()
    models = [copy.deepcopy(make_model()) for _ in clients]
    shared, weights = shared_leaves(models[0], method), [len(x) / sum(len(c[0]) for c in clients) for x, *_ in clients]
    for round in range(ROUNDS):
        for i, (model, (x, y, _, _)) in enumerate(zip(models, clients, strict=True)):
            train(model, x, y, torch.Generator().manual_seed(1000 * round + i))
        states = [model.state_dict() for model in models]
        mean = {leaf: sum(w * s[leaf] for w, s in zip(weights, states, strict=True)) for leaf in shared}
        for model in models:
            model.load_state_dict(mean, strict=False)
    right = [(m.eval()(c[2]).argmax(1) == c[3]).float().mean() for m, c in zip(models, clients, strict=True)]
    return 100 * float(torch.stack(right).mean())


if __name__ == "__main__":
    for method in ("local", "fedavg", "fedbn"):
        print(f"{method:7s} {run(method):5.1f} % correct, mean over {CLIENTS} clients")
