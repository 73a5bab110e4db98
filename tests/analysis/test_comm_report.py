"""The report's count against numbers computed by hand."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from wire_models import abstract_state, batch_of, squared_error

import zerojax
from zerojax.errors import ZeroError
from zerojax.formatting import size

P = 512  # of a model of one 16 x 32 matrix


class Matrix(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (16, 32)))

    def __call__(self, x):
        return jnp.tile(x, 4) @ self.kernel[...]


def report_of(loss=squared_error, nodes=2, local=4, model=Matrix, **settings):
    given: dict[str, Any] = {"preset": "zero3", "units": (model,), "block_size": 64, **settings}
    zero = zerojax.ZeroConfig.preset(given.pop("preset"), **given)
    mesh = zerojax.make_mesh(nodes, local)
    state = zerojax.TrainState.abstract(model, optax.sgd(0.1), loss, mesh=mesh, zero=zero)
    return zerojax.comm_report(state, batch_of(nodes * local * zero.accumulate))


def test_zero3_sends_3m_between_nodes():
    """Forward, backward, gradients: each M (N - 1) / N per node."""
    report = report_of()
    assert repr(report).startswith("<CommReport of 2 x 4 devices: each sends ")
    assert len(repr(report)) < 150
    assert report._repr_html_().count("<table>") == 2
    assert report.parameters == P
    assert report.model_bytes == 2 * P
    weights = (3 * 2 * 2 * P / 8, 1 * 2 * P / 8)  # over local: 3 peers, 2 rows each; over node: 1 peer
    assert report.phases()["weights forward"] == weights
    assert report.phases()["weights backward"] == weights
    assert report.phases()["gradients"] == (3 / 4 * 2 * P, 1 / 2 * 2 * P / 4)
    sums = report.phases()["metrics"]
    assert report.between_nodes - 4 * sums[1] == report.zero3_bytes == 3 * 2 * P / 2


def test_each_part_of_zero_plus_plus():
    """qwZ halves the weights, hpZ drops the backward's, qgZ quarters the gradients; scales come on top."""
    scales = 1 + 2 / 64  # two bytes per block of 64
    per_device = P / 8
    node = {name: sent[1] for name, sent in report_of(weights="int8").phases().items()}
    assert node["weights forward"] == node["weights backward"] == per_device * scales
    node = {name: sent[1] for name, sent in report_of(hpz=True).phases().items()}
    assert (node["weights forward"], node["weights backward"]) == (2 * per_device, 0)
    node = {name: sent[1] for name, sent in report_of(grads=("int4", "int4")).phases().items()}
    assert node["gradients"] == per_device * (0.5 + 2 / 64)


def test_delta_sends_once_however_many_micro_batches():
    one, four = (report_of(preset="delta", accumulate=k) for k in (1, 4))
    for phase in ("delta", "gradients"):
        assert one.phases()[phase][1] == four.phases()[phase][1] == P / 8 * (0.5 + 2 / 64)
    assert four.phases()["gradients"][0] == 4 * one.phases()["gradients"][0]
    for phase in ("weights forward", "weights backward"):
        assert one.phases()[phase][1] == four.phases()[phase][1] == 0, "the copies are there"
    by_micro = report_of(accumulate=4)
    assert by_micro.phases()["gradients"][1] == 4 * report_of().phases()["gradients"][1]


@pytest.mark.parametrize("style", ["stacked", "listed"])
def test_delta_sends_the_differences_of_each_layer_once(style):
    """The layers of a stack update their copies as they are called, and nothing repeats it afterwards."""
    state = abstract_state(style, zerojax.make_mesh(2, 4), zerojax.ZeroConfig.preset("delta", block_size=64))
    sent = [c for c in zerojax.comm_report(state, batch_of(8)).collectives if c.phase == "delta"]
    assert {c.axes for c in sent} == {("node",)}
    assert sum(c.count for c in sent) == 3 + 1, "three layers, and what is no layer"


def test_local_updates_send_a_fragment_and_gather_within_the_node():
    report = report_of(preset="local", every=3)
    blocks = 1  # of one block an owner has, a fragment takes all
    row = blocks * (64 / 2 + 2)
    assert report.phases()["fragment"] == (0, 2 * row + 284), "learnt, changed and told"
    assert report.node_bytes == 2 * row + 284
    alone = report_of(preset="zero3", nodes=1, local=4).phases()
    for phase in ("weights forward", "weights backward", "gradients"):
        assert report.phases()[phase] == alone[phase]
    assert report_of(preset="local", every=1, outer_delay=0).phases()["delta"] == (0, row)


def test_one_hop_sends_its_whole_gradient_from_every_device():
    report = report_of(grads=("bf16", "bf16"), grads_hops=1)
    assert report.phases()["gradients"] == (3 / 8 * 2 * P, 4 / 8 * 2 * P)
    assert {c.axes for c in report.collectives if c.phase == "gradients"} == {("node", "local")}


def test_chunks_are_as_many_collectives():
    one, two = (report_of(grads=("int8", "int4"), chunks=chunks) for chunks in (1, 2))
    for axis in ("local", "node"):
        counts = [
            sum(c.count for c in report.collectives if c.phase == "gradients" and c.axes == (axis,))
            for report in (one, two)
        ]
        assert counts[1] == 2 * counts[0] > 0


def test_the_resync_is_shown_and_not_counted():
    report = report_of(preset="delta", delta_resync=10)
    resync = [c for c in report.collectives if c.phase == "resync"]
    assert [c.node_bytes for c in resync] == [2 * P / 8]
    assert not any(c.usual for c in resync)
    assert report.node_bytes == report_of(preset="delta").node_bytes
    assert "(in parentheses: not in every step" in str(report)


def test_scans_and_accumulation_multiply():
    zero = zerojax.ZeroConfig(accumulate=3)
    state = abstract_state("stacked", zerojax.make_mesh(2, 2), zero, layers=5)
    report = zerojax.comm_report(state, batch_of(12))
    counts = {
        (c.phase, c.axes): c.count for c in report.collectives if c.elements > 400 and c.phase != "metrics"
    }
    assert counts["weights forward", ("node",)] == 3 * 5
    assert counts["weights backward", ("node",)] == 3 * 4, "the last layer's are still there"
    assert counts["gradients", ("node",)] == 3 * 5


def test_a_model_s_own_collectives():
    def loss(model, batch):
        mean = jax.lax.pmean(model(batch["x"]), ("node", "local"))
        return jnp.mean(mean)

    own = [c for c in report_of(loss).collectives if c.elements == 32]
    assert {(c.primitive, c.axes, c.dtype) for c in own} >= {("psum", ("node", "local"), "float32")}
    one = own[0]
    assert one.node_bytes == pytest.approx(one.count * 2 * 7 / 8 * 128 / 4), (
        "a ring; every fourth link leaves"
    )
    assert one.local_bytes == pytest.approx(3 * one.node_bytes)


def test_a_model_s_own_reduce_scatter():
    def loss(model, batch):
        y = model(batch["x"]).reshape(4, -1)
        return jnp.mean(jax.lax.psum_scatter(jax.lax.stop_gradient(y), "local")) + jnp.mean(y)

    (own,) = [c for c in report_of(loss).collectives if c.primitive == "reduce_scatter"]
    assert (own.axes, own.elements, own.node_bytes) == (("local",), 32, 0)
    assert own.local_bytes == own.count * 3 / 4 * 32 * 4


def test_what_cannot_be_counted_is_refused():
    def loss(model, batch):
        y = jnp.mean(model(batch["x"]))
        return y + jax.lax.while_loop(
            lambda x: x < 1, lambda x: x + jax.lax.psum(1.0 + x, "node"), jnp.float32(0)
        )

    with pytest.raises(ZeroError, match="while loop"):
        report_of(loss)

    def shift(model, batch):
        y = jnp.mean(model(batch["x"]))
        return y + jax.lax.stop_gradient(jax.lax.ppermute(y, "node", [(0, 1), (1, 0)]))

    with pytest.raises(ZeroError, match="ppermute"):
        report_of(shift)


def test_one_node_sends_nothing_between_nodes():
    report = report_of(nodes=1, local=8, preset="zero++")
    assert report.between_nodes == 0
    assert "one node: nothing crosses the network" in str(report)


def test_as_text_and_as_json():
    report = report_of(preset="zero++")
    text = str(report)
    for word in ("weights forward", "all_gather", "uint8", "gradients", "M = 2 bytes x 512 parameters"):
        assert word in text
    data = json.loads(json.dumps(report.to_dict()))
    assert data["between_nodes"] == report.between_nodes
    assert data["collectives"][0]["axes"] == ["node"]
    assert data["phases"]["gradients"]["node_bytes"] == report.phases()["gradients"][1]


def test_sizes_for_people():
    assert [size(x) for x in (0, 999, 1000, 1536, 12_345, 123_456, 999_900, 5.2e9)] == [
        "0 B", "999 B", "1.00 KB", "1.54 KB", "12.3 KB", "123 KB", "1.00 MB", "5.20 GB",
    ]  # fmt: skip
