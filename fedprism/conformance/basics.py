"""A method runs, learns, and does what it says of itself."""

from __future__ import annotations

import typing

import torch

from fedprism.config import MOMENTS
from fedprism.conformance.case import Case, Trained, sound
from fedprism.conformance.compare import kind
from fedprism.conformance.verdicts import Broken, DoesNotApply, Note, promise
from fedprism.errors import some, unknown
from fedprism.methods.base import Output, UploadKind, load
from fedprism.round.client import make_context
from fedprism.round.engine import Failure
from fedprism.round.noise import keyed_draw
from fedprism.round.training import model_inputs

CHOICES = {
    "bn": ("shared", "local", "local-stats", "local-affine"),
    "weighting": ("samples", "uniform", "contribution"),
    "broadcast": ("participants", "all"),
    "trainers": ("participants", "all"),
    "moment": MOMENTS,
}
LEARNED = 0.4  # share of test images, of ten classes


@promise("what it says of itself is possible", needs=())
def says(case: Case) -> None:
    method = case.method
    for name, choices in CHOICES.items():
        given = getattr(method, name)
        if given not in choices:
            raise Broken(unknown(f"value of {name}", str(given), choices))
    if method.moment == "global" and not (method.has_global and method.bn == "shared"):
        raise Broken(
            f"moment is 'global', but has_global is {method.has_global} and bn is {method.bn!r}: without one model for "
            "everybody, batch norm included, there is nothing to test at that moment.",
            "set has_global = True and bn = 'shared', or moment = 'received'.",
        )


@promise("uploads are what is declared", needs=("says",))
def declared(case: Case) -> None:
    try:
        run = case.straight
    except Exception:  # noqa: BLE001 - that promise is `runs`, which says what was raised
        raise DoesNotApply("the plain run stops with an error; see 'it trains'") from None
    hint = "`uploads(model, ctx)` names what `upload(client, ctx)` returns, for the same client and round."
    for round, answers in run.answers.items():
        for client_id, answer in answers.items():
            if isinstance(answer, Failure):
                continue
            where, wanted = f"round {round + 1}, client {client_id}", _declared(run, client_id, round)
            refused = run.records[round + 1].failed.get(client_id)
            if refused is not None:
                raise Broken(f"{where}: the server refused the upload: {refused}.", hint)
            odd = {name: str(of) for name, of in wanted.items() if of not in typing.get_args(UploadKind)}
            for name, of in odd.items():
                raise Broken(f"{where}: {name}: {unknown('kind of upload', of, typing.get_args(UploadKind))}", hint)


def _declared(run: Trained, client_id: str, round: int) -> typing.Mapping[str, str]:
    loop, model = run.loop, run.first_model(client_id)
    return loop.method.uploads(model, make_context(loop.method, loop.config, loop.info, model, round, client_id))


@promise("it trains: nobody fails, and every number is finite", needs=("says", "declared", "stored"))
def runs(case: Case) -> None:
    sound(case.straight)


@promise("it learns: well above chance after six rounds")
def learns(case: Case) -> None:
    train = {"rounds": 6, "batch_size": 10, "epochs": 2}
    run = case.run(case.config(train=train, evaluate={"every": 6, "moments": list(MOMENTS)}))
    sound(run)
    moment = case.method.moment
    scores = run.records[-1].scores[moment]["test"].values()
    share = sum(score.correct for score in scores) / sum(score.total for score in scores)
    if share <= LEARNED:
        raise Broken(
            f"after six rounds of two local epochs, {100 * share:.0f} % of the test images are recognised at the "
            f"moment {moment!r}; expected more than {100 * LEARNED:.0f} %. Ten classes: chance is 10 %.",
            "if it needs other settings to learn within six rounds, give them: --set method.KEY=VALUE.",
        )


@promise("what is shown is what is predicted")
def details(case: Case) -> None:
    run = case.straight
    method, client_id = run.loop.method, run.loop.info.clients[0]
    model = run.first_model(client_id)
    load(model, run.received(client_id))
    model.eval()
    data = run.loop.federation.clients[client_id]
    x, draw = model_inputs(data.test.x, run.loop.config), keyed_draw(None, "test")
    with torch.no_grad():
        shown, predicted = method.forward_details(model, x, draw), method.predict(model, x, draw)
        of_all = [method.predict_global(model, x, draw)] if method.has_global else []
    for scores in (predicted, *of_all):
        if scores.shape != (len(x), data.classes):
            raise Broken(f"predict gives scores {kind(scores)}; expected [batch, classes]: {[len(x), data.classes]}.")
    if not torch.equal(shown.scores, predicted):
        raise Broken(
            "forward_details(model, x, draw).scores are not what predict(model, x, draw) gives for the same images.",
            "override one of the two: the other one calls it. Noise comes from `draw`, never from elsewhere.",
        )
    _check_details(shown, len(x))


def _check_details(shown: Output, count: int) -> None:
    for name, scores in shown.branches.items():
        if scores.shape != shown.scores.shape:
            raise Broken(
                f"branch {name!r} has scores {kind(scores)}; expected {kind(shown.scores)}, as the whole model."
            )
    for name, values in {**shown.means, **shown.quantiles}.items():
        if len(values) != count:
            raise Broken(f"{name!r} of forward_details is {kind(values)} for {count} images; expected a row per image.")


@promise("what it logs and shows has words")
def words(case: Case) -> None:
    record = case.straight.records[-1]
    shown = {log for logs in record.logs.values() for log in logs if not log.startswith("loss/")}
    for score in record.scores["received"]["test"].values():
        # Quantiles are explained by what they are of.
        shown |= {*score.branches, *(value.partition("/q")[0] for value in score.diagnostics)}
    explained = set(case.method.shows)
    if shown - explained:
        raise Note(f"it logs or shows {some(sorted(shown - explained))}; `shows` should say what that means.")
    if explained - shown:
        raise Note(f"`shows` explains {some(sorted(explained - shown))}, which four rounds neither log nor show.")
