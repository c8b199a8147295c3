"""A transform of your own in one short file: clients send the largest tenth of their update, and where it belongs.

Run it by itself, or through the command line:

    python examples/add_a_transform.py
    fedprism run examples/digits-skew.yaml --set "transforms=[{name: 'examples/add_a_transform.py:TopK', share: 0.05}]"
"""

from dataclasses import dataclass

import torch

import fedprism as fp
from fedprism.config import setting
from fedprism.methods.base import State
from fedprism.transforms.base import MARK, Transform, UploadContext

VALUES, PLACES = f"{MARK}values", f"{MARK}places"  # what is sent of a leaf


@dataclass(frozen=True)
class TopK(Transform):
    idea = "Of each leaf's update the largest values are sent, with their places; the rest counts as 0."
    shows = {"topk/kept": "share of the update's squared length that is sent"}
    packs = True  # what is sent can only be read by `server`

    share: float = setting(0.1, "share of the values that are sent", lambda v: 0 < v <= 1, "above 0 to 1")

    def client(self, upload: State, context: UploadContext) -> State:
        chosen = {n: t for n, t in context.chosen(upload, self.kinds).items() if n in context.origin}
        sent, whole, kept = {n: t for n, t in upload.items() if n not in chosen}, 0.0, 0.0
        for name, update in context.update(chosen).items():
            flat = update.flatten()
            places = flat.abs().topk(max(1, round(self.share * len(flat)))).indices
            sent |= {name + VALUES: flat[places], name + PLACES: places.to(torch.int32)}
            whole, kept = whole + float(flat.square().sum()), kept + float(flat[places].square().sum())
        context.log("topk/kept", kept / max(whole, 1e-30))
        return sent

    def server(self, sent: State, context: UploadContext) -> State:
        packed = [n for n, kind in context.kinds.items() if kind in self.kinds and n + VALUES in sent]
        parts = {n + part for n in packed for part in (VALUES, PLACES)}
        upload = {n: t for n, t in sent.items() if n not in parts}
        for name in packed:
            flat, places = context.origin[name].flatten().clone(), sent[name + PLACES].long()
            if not ((places >= 0) & (places < len(flat))).all():  # somebody else has sent it
                raise ValueError(f"{name} has places outside of its {len(flat)} values")
            flat.index_add_(0, places, sent[name + VALUES])
            upload[name] = flat.view_as(context.origin[name])
        return upload


if __name__ == "__main__":
    federation = fp.make_federation("digits-skew", clients=5, seed=0)
    for transforms in ("[]", f"[{{name: '{__file__}:TopK', share: 0.1}}]"):
        run = fp.train(federation, "fedavg", rounds=10, out=False, settings=[f"transforms={transforms}"])
        print(run.table(), "bytes up:", sum(sum(each.up.values()) for each in run.record.rounds))
