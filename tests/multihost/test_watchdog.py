"""The watchdog's limits, with a simulated clock; and the stacks that it dumps."""

import os
import subprocess
import sys
import time

import pytest

from zerojax.multihost import watchdog
from zerojax.multihost.watchdog import Watchdog, dump_stacks
from zerojax.run.config import ClusterSection

pytestmark = pytest.mark.alone


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def watch(clock, **settings):
    names = ("phase_timeout", "step_timeout", "step_factor")
    usual = {name: getattr(ClusterSection(), name) for name in names}
    return Watchdog(lambda line: None, clock=clock, **usual | settings)


def pass_time(clock, dog, seconds):
    """Advance the clock in steps, checking each time."""
    end = clock.now + seconds
    while clock.now < end:
        assert dog.look() is None, clock.now
        clock.now += min(2.0, end - clock.now)


def train(clock, dog, steps, seconds):
    for number in range(1, steps + 1):
        dog.step(number)
        pass_time(clock, dog, seconds)


def test_a_step_may_take_a_multiple_of_the_recent_ones(clock):
    dog = watch(clock, step_timeout=1, step_factor=10)
    train(clock, dog, 30, 3.0)
    dog.step(31)
    pass_time(clock, dog, 30)
    clock.now += 0.5
    assert dog.look() == "step 31 has taken 30.5 s; recent ones took 3 s: ending"


def test_a_phase_may_have_more_time(clock):
    dog = watch(clock, phase_timeout=60)
    dog.phase("scoring", 30)
    pass_time(clock, dog, 90)
    clock.now += 0.5
    assert dog.look() == "scoring has taken 90.5 s: ending"
    dog.phase("a rollout")
    pass_time(clock, dog, 60)
    clock.now += 0.5
    assert dog.look() == "a rollout has taken 60.5 s: ending"
    dog = watch(clock, phase_timeout=0)
    dog.phase("scoring", 30)
    pass_time(clock, dog, 9000)


def test_step_timeout_is_the_least_limit(clock):
    dog = watch(clock, step_timeout=60, step_factor=10)
    train(clock, dog, 30, 0.1)
    dog.step(31)
    pass_time(clock, dog, 60)
    clock.now += 0.5
    assert dog.look() is not None


@pytest.mark.parametrize("settings", [{"step_factor": 0, "phase_timeout": 0}, {"step_timeout": 1e9}])
def test_zero_turns_the_limits_off(clock, settings):
    dog = watch(clock, **settings)
    train(clock, dog, 30, 0.1)
    dog.step(31)
    pass_time(clock, dog, 10_000)


def test_the_first_steps_have_the_limit_of_a_phase(clock):
    dog = watch(clock, step_timeout=1, phase_timeout=600)
    dog.step(1)
    pass_time(clock, dog, 600)
    clock.now += 1
    assert dog.look() is not None


def test_phases_have_their_own_limit_and_do_not_count_as_steps(clock):
    dog = watch(clock, step_timeout=1, step_factor=10, phase_timeout=100)
    for number in range(1, 21):
        dog.step(number)
        pass_time(clock, dog, 1.0)
        dog.phase(f"the checkpoint at step {number}")
        pass_time(clock, dog, 90.0)
    dog.step(21)
    pass_time(clock, dog, 10)
    clock.now += 0.5
    assert dog.look() == "step 21 has taken 10.5 s; recent ones took 1 s: ending"
    dog.phase("the evaluation after step 21")
    pass_time(clock, dog, 100)
    clock.now += 0.5
    assert dog.look() == "the evaluation after step 21 has taken 100 s: ending"


def test_a_pause_of_the_whole_process_does_not_count(clock):
    dog = watch(clock, step_timeout=5)
    train(clock, dog, 10, 0.1)
    dog.step(11)
    assert dog.look() is None
    clock.now += 7200
    assert dog.look() is None


def test_it_reports_once(clock):
    said = []
    dog = Watchdog(said.append, phase_timeout=0.01)
    dog.phase("waiting")
    dog.start()
    end = time.monotonic() + 10
    while not said and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.6)
    assert len(said) == 1
    assert said[0].startswith("waiting has taken ")


def test_a_process_without_peers_ends_and_its_stacks_remain(tmp_path):
    program = f"""
import pathlib, time
from zerojax.multihost.watchdog import Watchdog, end_alone
stop = lambda line: end_alone(pathlib.Path({str(tmp_path)!r}, "s", "0"), line)
dog = Watchdog(stop, phase_timeout=0.1)
dog.phase("sleeping")
def sleep_for_ever():
    dog.start()
    time.sleep(1000)
sleep_for_ever()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert f"the stacks of its threads are in {tmp_path}/s/0" in done.stderr
    assert "in sleep_for_ever" in (tmp_path / "s" / "0").read_text()


def test_stacks_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    assert "could not be written" in dump_stacks(tmp_path / "file" / "stacks")


def test_stacks_on_a_hung_disk(tmp_path, monkeypatch):
    """Opening a pipe that nobody reads blocks."""
    os.mkfifo(tmp_path / "stacks")
    monkeypatch.setattr(watchdog, "_DUMP", 0.2)
    assert dump_stacks(tmp_path / "stacks") == "; the stacks could not be written: the disk does not respond"
