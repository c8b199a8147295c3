"""A method of your own in one short file: FedBN whose clients keep a share of their own head.

Run it by itself, or through the command line:

    python examples/add_a_method.py
    fedprism run examples/digits-skew.yaml --method examples/add_a_method.py:HeadMix --set method.keep=0.8
"""

from dataclasses import dataclass

import fedprism as fp
from fedprism.methods.base import Client, Context, Method, leaves, load, setting


@dataclass(frozen=True)
class HeadMix(Method):
    idea = "FedBN; the head that a client starts from is a mixture of its own and everybody's."
    shares = "everything but batch norm"
    stays = "batch norm, and a share of the head"
    bn = "local"

    keep: float = setting(0.5, "share of the own head", lambda v: 0 <= v <= 1, "0 to 1")

    def receive(self, client: Client, ctx: Context) -> None:
        own = client.model.state_dict()
        mixed = {
            name: self.keep * own[name] + (1 - self.keep) * ctx.download[name]
            for name in leaves.part(client.model, "head")
        }
        load(client.model, {**ctx.download, **mixed})


if __name__ == "__main__":
    federation = fp.make_federation("digits-skew", clients=5, seed=0)
    for method in (fp.FedBN(), HeadMix(keep=0.8)):
        print(fp.train(federation, method=method, rounds=10, out=False).table())
