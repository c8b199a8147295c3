"""Can the training steps be captured, so that they are fast on a GPU? Where not, they run step by step: a note."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, bool, uint8
from torch.overrides import TorchFunctionMode

from fedprism.conformance.case import Case, Trained, with_passes
from fedprism.conformance.compare import first_difference
from fedprism.conformance.frames import own_frames, shown
from fedprism.conformance.verdicts import CPU, Broken, Note, promise
from fedprism.engines.cuda.engine import CudaGraphs
from fedprism.engines.cuda.guard import CaptureGuard, NotCapturable
from fedprism.methods.base import Client, Context, Pass
from fedprism.round.engine import Failure, Request, Result

ROUNDS = 2  # that are captured
WATCHED = 3
FETCHES = {Tensor.tolist: ".tolist()", Tensor.numpy: ".numpy()", Tensor.cpu: ".cpu()"}
MASKED = ("index", "index_put", "index_put_", "_index_put_impl_")


@promise("its steps can be captured on a GPU", needs=("runs", "same-seed", "order"))
def capture(case: Case) -> None:
    """The engine for GPUs on a CPU, where it runs what it would replay; and what only a GPU would refuse."""
    try:
        watched(case)
    except NotCapturable as why:
        frames = own_frames(why, type(case.method))
        where = f" ({shown(frames[-1].filename)}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
        raise Note(f"runs step by step on a GPU: {why}{where}.") from None
    with _quiet():
        run = case.run(case.config(run={"slots": 2}), Answering, until=ROUNDS)
    differs = first_difference(run, case.straight)
    if differs is not None:
        raise Broken(
            f"on the engine for GPUs, which captures a step once and replays it, the run departs from the straight one "
            f"{differs}.",
            "a loss depends on tensors alone: on its batch, `client.model`, scratch and `client.draw`. What changes "
            "from step to step or from client to client in Python is not replayed; put it into scratch (client.keep).",
        )
    if isinstance(run.engine, CudaGraphs) and run.engine.reasons:
        name, reason = next(iter(run.engine.reasons.items()))
        raise Note(f"pass {name!r} runs step by step on a GPU: {reason}.")


class Answering(CudaGraphs):
    """The engine for GPUs, which remembers what clients answered, per round."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.answers: dict[int, dict[str, Result | Failure]] = {}

    def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        for client_id, answer in super().train(round, requests):
            self.answers.setdefault(round, {})[client_id] = answer
            yield client_id, answer


@contextmanager
def _quiet() -> Iterator[None]:
    """Within: the engine does not log why it captures nothing; the note says it."""
    log = logging.getLogger("fedprism")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def watched(case: Case) -> Trained:
    """Every step of three rounds (forward, backward, update) under watch; the passes' `start` and `end` are free."""
    with ExitStack() as watch:

        def change(each: Pass) -> Pass:
            def start(client: Client, ctx: Context) -> None:
                if each.start is not None:
                    each.start(client, ctx)
                watch.enter_context(NoFetching())
                watch.enter_context(MaskGuard(CPU))

            def end(client: Client, ctx: Context) -> None:
                watch.close()
                if each.end is not None:
                    each.end(client, ctx)

            return replace(each, start=start, end=end)

        return case.run(method=with_passes(case.make(), change), until=WATCHED)


class NoFetching(TorchFunctionMode):
    """Within: what takes values to the host is an error. On a CPU these are no operations that a guard could see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FETCHES:
            raise NotCapturable(f"it waits for the device: {FETCHES[func]}")
        return func(*args, **(kwargs or {}))


class MaskGuard(CaptureGuard):  # type: ignore[no-untyped-call]
    """A guard that also sees boolean indexing on a CPU, where that is one operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in MASKED and any(index is not None and index.dtype in (bool, uint8) for index in args[1]):
            raise NotCapturable("it waits for the device: boolean indexing or nonzero")
        return super().__torch_dispatch__(func, types, args, kwargs)
