"""Flower's client. A module of its own, so that Ray's workers import it and keep the data between messages."""

from __future__ import annotations

from functools import lru_cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from workload import Workload, network, read, train

app = ClientApp()
workload = lru_cache(maxsize=1)(read)


@app.train()
def train_client(message: Message, context: Context) -> Message:
    config = message.content["config"]
    work: Workload = workload(config["workload"])
    client, round = int(context.node_config["partition-id"]), int(config["server-round"]) - 1
    model = network(len(work.weights["head.fc2.bias"]))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    seconds = train(model, work, round, client)
    metrics = {"num-examples": work.samples, "seconds": seconds, "threads": torch.get_num_threads()}
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=message)
