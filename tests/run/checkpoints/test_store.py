"""Which checkpoints are kept, and when one is due by time."""

import math

import pytest

from zerojax.run.checkpoints import Beside, Manifest, Record, Retention, TrainingClock

# Step -> (hours of training, validation loss or None).
RUN: dict[int, tuple[int, float | None]] = {
    100: (1, 5.0),
    200: (2, 3.0),
    300: (3, None),
    400: (4, 2.5),
    500: (5, math.nan),
    600: (6, 4.0),
    700: (7, 2.7),
}


def manifests(run: dict[int, tuple[int, float | None]]) -> list[Manifest]:
    return [
        Manifest(
            step,
            0.0,
            Record(seconds=hours * 3600.0, metrics={} if loss is None else {"validation_loss": loss}),
            {},
        )
        for step, (hours, loss) in run.items()
    ]


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), [100, 200, 300, 400, 500, 600, 700]),
        (Retention(1), [600, 700]),
        (Retention(2), [600, 700]),
        (Retention(3), [500, 600, 700]),
        (Retention(9), [100, 200, 300, 400, 500, 600, 700]),
        (Retention(1, every=200), [200, 400, 600, 700]),
        (Retention(1, best=1), [400, 600, 700]),
        (Retention(1, best=3), [200, 400, 600, 700]),
        (Retention(1, minutes=120), [600, 700]),
        (Retention(1, minutes=121), [500, 600, 700]),
        (Retention(1, every=300, best=1, minutes=90), [300, 400, 600, 700]),
    ],
)
def test_the_rules_decide_which_checkpoints_stay(retention: Retention, kept: list[int]) -> None:
    surplus = retention.surplus(manifests(RUN))
    assert [step for step in RUN if step not in surplus] == kept


def test_one_after_the_other_leads_to_the_same() -> None:
    """As in a run: each save removes the surplus."""
    retention, there = Retention(2, every=300, best=1), dict[int, tuple[int, float | None]]()
    for step, facts in RUN.items():
        there[step] = facts
        for gone in retention.surplus(manifests(there)):
            del there[gone]
    assert list(there) == [300, 400, 600, 700]


def test_a_save_is_due_when_the_minutes_are_over() -> None:
    now = 1000.0
    clock = TrainingClock(50.0, minutes=2, clock=lambda: now)
    assert (clock.seconds, clock.wants_save) == (50.0, False)
    now += 119
    assert not clock.wants_save
    now += 1
    assert (clock.seconds, clock.wants_save) == (170.0, True)
    clock.saved()
    assert not clock.wants_save
    now += 120
    assert clock.wants_save


def test_no_save_is_due_without_minutes() -> None:
    now = 0.0
    clock = TrainingClock(clock=lambda: now)
    now += 1e9
    assert not clock.wants_save


def test_setting_the_machine_s_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = TrainingClock(minutes=1)
    for jump in (-1e9, 1e9):
        monkeypatch.setattr("time.time", lambda jump=jump: jump)
        assert not clock.wants_save
        assert 0 <= clock.seconds < 10


@pytest.mark.parametrize(
    "record",
    [Record(base="checkpoints/100"), Record(beside={"critic": Beside({}, base="checkpoints/100")})],
)
def test_what_a_run_cannot_go_on_without_stays(record: Record) -> None:
    there = [*manifests(RUN)[:-1], Manifest(700, 0.0, record, {})]
    assert Retention(2).surplus(there) == [200, 300, 400, 500]
