"""Options that would send or hold less: the formulas agree with the command line."""

import pytest

from zerojax.analysis.comm_report import CommReport, comm_report
from zerojax.analysis.plan import plan_state, predict_memory
from zerojax.analysis.plan.work import decoder_work
from zerojax.cli.on_config import Options, parse
from zerojax.cli.savings import SAME, Savings, Trial
from zerojax.cli.trained import abstract_run
from zerojax.run.config import RunConfig
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState

TINY = ["gpt-tiny", "--mesh.nodes", "2", "--mesh.local", "4", "--model.loss-chunk", "256"]


def opened(*options: str) -> tuple[RunConfig, TrainSpec]:
    _, config = parse(Options, "plan", [*TINY, *options])
    return config, abstract_run(config)[0].spec


def check(trial: Trial, *options: str) -> None:
    """What a trial says is what the plan of the command line with that option says."""
    config, spec = opened(*options, *trial.option.split())
    train, zero = config.train, spec.zero
    plan = plan_state(spec)
    assert trial.sent == (plan.between_nodes if spec.world.nodes > 1 else plan.local_bytes)
    work = decoder_work(
        config.model,
        remat=zero.remat,
        dtype=str(zero.compute_dtype),
        sequences=train.batch_size // (8 * train.accumulate),
        length=train.sequence_length,
    )
    assert trial.held == pytest.approx(predict_memory(spec, work).total, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "sent", "held"),
    [
        (
            (),
            ["--zero.preset delta", "--zero.stage 2", "--zero.preset local"],
            ["--train.accumulate 4", "--zero.remat full", "--zero.host optimizer"],
        ),
        (
            ("--zero.preset", "delta"),
            ["--zero.preset local"],
            ["--train.accumulate 4", "--zero.host optimizer"],
        ),
        pytest.param(
            ("--zero.preset", "local"),
            [],
            ["--train.accumulate 4", "--zero.host optimizer"],
            marks=pytest.mark.slow,
        ),
        (
            ("--zero.preset", "zero++", "--train.accumulate", "4", "--zero.remat", "none"),
            ["--zero.preset delta", "--zero.accumulate-order breadth", "--zero.preset local"],
            ["--zero.remat full", "--zero.host optimizer"],
        ),
        (
            ("--mesh.nodes", "1", "--mesh.local", "8"),
            ["--zero.stage 2"],
            ["--train.accumulate 4", "--zero.remat full", "--zero.host optimizer"],
        ),
    ],
)
def test_reported_savings_are_those_of_the_option(options: tuple[str, ...], sent: list[str], held: list[str]):
    savings = Savings(*opened(*options))
    check(savings.now, *options)
    assert [trial.option for trial in savings.sent()] == sent
    assert [trial.option for trial in savings.held()] == held
    for trial in (*savings.sent(), *savings.held()):
        check(trial, *options)
    assert all(trial.sent < savings.now.sent for trial in savings.sent())
    assert all(trial.held < savings.now.held for trial in savings.held())


@pytest.mark.slow
def test_the_count_of_the_traced_step_agrees():
    """Also of a state that every node holds whole, with Muon's matrices."""

    def counted(*options: str) -> tuple[RunConfig, TrainState, CommReport]:
        muon = ["--optimizer.name", "muon", "--zero.matrix-spread", "world"]
        _, config = parse(Options, "comm", [*TINY, *muon, *options])
        state, batch = abstract_run(config)
        return config, state, comm_report(state, batch)

    config, state, report = counted()
    savings = Savings(config, state.spec, report)
    assert savings.now.sent == round(report.between_nodes) > plan_state(state).between_nodes
    trials = savings.sent()
    assert ("--zero.state-spread node", SAME) in [(trial.option, trial.price) for trial in trials]
    for trial in trials:
        assert counted(*trial.option.split())[2].between_nodes == pytest.approx(trial.sent, abs=16)


def test_lines_say_what_would_save():
    savings = Savings(*opened())
    line = savings.sent_line()
    assert line.count("\n") == 0
    assert line.startswith(
        "To send less than 2.76 MB between nodes, per node and step: --zero.preset delta sends "
    )
    assert "changes of weights in int4, gradients in int8 and int4" in line
    assert "; --zero.stage 2 sends 2.23 MB (in the same formats" in line
    assert "activations included: --train.accumulate 4 holds" in savings.held_line()
    assert "sends 8.27 MB more)" in savings.held_line()  # each micro-batch gathers the weights again
    savings = Savings(*opened("--zero.preset", "delta"))
    assert ": --zero.preset local sends " in savings.sent_line()
    assert "by 7.5% with adamw and zero.every = 64, in 400 steps" in savings.sent_line()
    savings = Savings(*opened("--zero.preset", "local"))
    assert savings.sent_line().endswith("per node and step: no option alone does it.")
