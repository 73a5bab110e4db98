"""Profiles: the trace of a run, the names of its ranges, and how much communication is hidden."""

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from micro_run import micro_config

from zerojax.analysis.profile import StepProfile, measure_overlap, parse_steps, read_events, trace_files
from zerojax.analysis.profile.events import events_of, scope_of
from zerojax.cli import main
from zerojax.errors import ZeroError
from zerojax.run.html_report import RunData
from zerojax.run.run_dir import RunFolder
from zerojax.run.train_run import TrainRun


@pytest.fixture(scope="module")
def profiled(text: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of ZeRO++ whose second and third steps were traced."""
    folder = RunFolder(tmp_path_factory.mktemp("profiled") / "run")
    config = micro_config(
        text,
        train={"steps": 4, "eval_every": 0},
        model={"layers": 2},  # a last layer's weights are still there in the backward pass
        zero={"preset": "zero++"},
        mesh={"local": 2},
    )
    with TrainRun.open(config, folder, profile=range(2, 4)) as trainer:
        trainer.train()
    return folder


@pytest.mark.slow
def test_a_trace_names_every_hop_and_the_layers(profiled: RunFolder) -> None:
    (path,) = trace_files(profiled.profile)
    events = read_events(path)
    assert {event.device for event in events} == {0, 1, 2, 3}
    wanted = {"gather_node", "gather_local", "gather_local backward", "encode_gradients backward"}
    wanted |= {"reduce_local backward", "reduce_node backward", "layer", "layer backward", "optimizer"}
    assert wanted <= {event.scope for event in events}
    # hpZ: nothing is gathered over the nodes in the backward pass.
    assert "gather_node backward" not in {event.scope for event in events}
    sent = {event.scope for event in events if event.communicates}
    assert {"gather_node", "gather_local", "reduce_local backward", "reduce_node backward"} <= sent
    assert not sent & {"layer", "layer backward", "encode_gradients backward"}


def chrome_events(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


@pytest.mark.slow
def test_perfetto_and_tensorboard_have_their_files(profiled: RunFolder) -> None:
    (path,) = trace_files(profiled.profile)
    assert path.parent.parent == profiled.profile / "plugins" / "profile"
    (chrome,) = [p for p in path.parent.glob("*.trace.json.gz") if p.name != "ranges.trace.json.gz"]
    steps = [e for e in chrome_events(chrome) if e.get("name") == "train"]
    assert sorted(int(e["args"]["step_num"]) for e in steps) == [2, 3]
    ranges = chrome_events(path.with_name("ranges.trace.json.gz"))
    drawn = [e for e in ranges if e["ph"] == "X"]
    assert {"gather_node", "reduce_node backward", "layer", "layer backward"} <= {e["name"] for e in drawn}
    assert all(e["dur"] >= 0 for e in drawn)
    assert {e["args"]["name"] for e in ranges if e["name"] == "process_name"} >= {"device 0", "device 3"}


@pytest.mark.slow
def test_the_report_and_the_overlap_command_find_it(
    profiled: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (profile,) = RunData(profiled).profiles
    assert profile.startswith("profile/plugins/profile/")
    assert main(["overlap", str(profiled.path)]) == 0
    out = capsys.readouterr().out
    assert "gather_node" in out
    assert "hidden behind compute" in out


@pytest.mark.slow
def test_a_step_that_fails_ends_the_trace(tmp_path: Path) -> None:
    said: list[str] = []
    profile = StepProfile(tmp_path, range(1, 3), said.append, done=0, planned=5)
    profile.step(1, lambda: jax.jit(lambda x: x * 2)(jnp.ones(3)))
    profile.close()
    profile.close()
    assert len(trace_files(tmp_path)) == 1
    assert len(said) == 1


@pytest.mark.slow
def test_programs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    def program(scope: str) -> jax.stages.Wrapped:
        def _train(x: jax.Array) -> jax.Array:
            with jax.named_scope(scope):
                return jnp.sin(x @ x)

        return jax.jit(_train)

    x = jnp.ones((8, 8))
    ran, idle = program("optimizer"), program("layer")
    jax.block_until_ready((ran(x), idle(x)))
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(ran(x))
    (path,) = trace_files(tmp_path)
    assert "optimizer" in {event.scope for event in read_events(path)}


@pytest.mark.parametrize("text", ["5", "5:", ":5", "7:5", "0:3", "a:b", "1:2:3", "-1:2"])
def test_steps_that_are_none(text: str) -> None:
    with pytest.raises(ZeroError, match="give two step numbers, start:stop"):
        parse_steps(text)


def test_steps_that_will_not_come(tmp_path: Path) -> None:
    assert parse_steps("5:7") == range(5, 8)
    for done, planned in ((5, 10), (0, 6)):
        with pytest.raises(ZeroError, match=rf"will only take steps {done + 1} to {planned}"):
            StepProfile(tmp_path, range(5, 8), print, done=done, planned=planned)


def test_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ZeroError, match="no trace"):
        trace_files(tmp_path)
    (tmp_path / "x.xplane.pb").write_bytes(b"\xff\xff\xff")
    with pytest.raises(ZeroError, match="cannot be read as a trace"):
        read_events(tmp_path / "x.xplane.pb")


# A trace of a GPU, as ProfileData shows one: a plane a device, a line a stream.


@dataclass
class Kernel:
    """An event; times in ns."""

    name: str
    start_ns: float
    duration_ns: float
    stats: list[tuple[str, Any]] = field(default_factory=list)


@dataclass
class Line:
    """A stream, or a summary of the profiler."""

    name: str
    events: list[Kernel]


@dataclass
class Plane:
    """A device."""

    name: str
    lines: list[Line]


@dataclass
class Profile:
    """A trace."""

    planes: list[Plane]


def kernel(name: str, start: float, end: float, op: str) -> Kernel:
    return Kernel(name, start, end - start, [("hlo_op", op), ("hlo_module", "jit__train"), ("program_id", 7)])


NAMES = {
    "jit__train(7)": {
        "fusion.1": ("fusion", "jit(_train)/shard_map/jvp(layer)/dot_general"),
        "all-gather-start.1": ("all-gather-start", "jit(_train)/shard_map/jvp(gather_node)/all_gather"),
        "all-to-all.2": ("all-to-all", "jit(_train)/shard_map/transpose(jvp(reduce_local))/all_to_all"),
        "while.1": ("while", "jit(_train)/while"),
    },
    # Another program of the same name, which did not run.
    "jit__train(9)": {"fusion.1": ("fusion", "jit(_train)/shard_map/reduce_node/mul")},
}


def gpu() -> Profile:
    """On device 0 a gather of 100 ns, 30 of them without compute, and an exchange of 50 without any."""
    compute = [kernel("gemm", 0, 40, "fusion.1"), kernel("gemm", 70, 120, "fusion.1")]
    # Two kernels of one gather that overlap each other hide nothing of each other.
    gather = [
        kernel("ncclDevKernel_AllGather_RING_LL", 10, 60, "all-gather-start.1"),
        kernel("ncclDevKernel_AllGather_RING_LL", 50, 110, "all-gather-start.1"),
    ]
    exchange = [kernel("ncclDevKernel_SendRecv", 120, 170, "all-to-all.2")]
    return Profile(
        [
            Plane("/host:CPU", [Line("python", [Kernel("train", 0, 500)])]),
            Plane(
                "/device:GPU:0",
                [
                    Line("Stream #13(Compute)", compute),
                    Line("Stream #14(Comm)", gather + exchange),
                    Line("XLA Ops", [kernel("all of it", 0, 500, "fusion.1")]),
                    Line("XLA Modules", [Kernel("jit__train", 0, 500)]),
                ],
            ),
            Plane("/device:GPU:1", [Line("Stream #13(Compute)", [kernel("gemm", 0, 10, "fusion.1")])]),
        ]
    )


def test_overlap_on_gpus() -> None:
    events = events_of(gpu(), NAMES)
    assert len(events) == 6
    found = measure_overlap(events)
    assert found.total == pytest.approx(150e-9)
    assert found.hidden == pytest.approx(70e-9)
    assert found.compute == pytest.approx(100e-9)
    assert found.fraction == pytest.approx(70 / 150)
    assert found.hops == {
        "gather_node": (pytest.approx(100e-9), pytest.approx(70e-9)),
        "reduce_local backward": (pytest.approx(50e-9), pytest.approx(0.0)),
    }
    assert "46.7%" in str(found)


def test_what_holds_others_is_not_counted_twice() -> None:
    profile = gpu()
    profile.planes[1].lines[0].events.append(kernel("while", 0, 500, "while.1"))
    assert measure_overlap(events_of(profile, NAMES)).hidden == pytest.approx(70e-9)


def test_nothing_sent() -> None:
    assert measure_overlap([]).fraction == 1.0


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("jit(_train)/shard_map/jvp()/while/body/eval_jaxpr/gather_node/jit(encode)", "gather_node"),
        ("jit(_train)/shard_map/transpose(jvp())/while/body/reduce_local/mul", "reduce_local backward"),
        ("jit(_train)/optimizer/orthogonalise/all_to_all", "orthogonalise"),
        ("jit(_train)/mul", ""),
    ],
)
def test_scopes(op_name: str, scope: str) -> None:
    assert scope_of(op_name) == scope
