"""Wrong use is refused before a device is touched, by a message that names the thing and the way out."""

import functools
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import CASES, Block, LinenListed, Listed, regression_batch, squared_error
from flax import linen, nnx
from fp8_models import Fp8Block, Fp8Model

import zerojax
from pallas_kernels import FORMATS
from zerojax import TrainState, ZeroConfig, ZeroError
from zerojax.train.step import lower_eval_step
from zerojax.zero_config.config import COMPUTE_FORMAT
from zerojax.zero_config.options import WireFormat

BATCH = regression_batch(np.random.default_rng(0), 8)


def refused(message: str) -> Any:
    return pytest.raises(ZeroError, match=message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, r"stage=4 is not one of \(0, 1, 2, 3\)"),
        ({"compute_dtype": "float16"}, r"compute_dtype='float16' is not one of .*bfloat16"),
        ({"remat": "some"}, r"remat='some' is not one of .*attention"),
        ({"accumulate": 0}, r"accumulate=0 must be at least 1"),
        ({"accumulate_order": "both"}, r"accumulate_order='both' is not one of .*breadth"),
        ({"accumulate_order": "breadth", "stage": 2}, r"stage 2 gathers none: use stage 3, or \"depth\""),
        ({"chunks": 0}, r"chunks=0 must be at least 1"),
        ({"sequence_parallel": 2.0}, r"sequence_parallel=2.0 must be a whole number"),
        ({"hpz": "no"}, r"hpz = 'no' must be true or false"),
        ({"host": None}, r"host has None, which is not one of"),
        ({"grads_hops": 3}, r"grads_hops=3 is not one of \(1, 2\)"),
        ({"grad_sync": "never"}, r"grad_sync='never' is not one of .*micro"),
        ({"rounding": "up"}, r"rounding='up' is not one of .*stochastic"),
        ({"rotation": 16}, r"rotation=16 is not one of \(0, 32\)"),
        ({"block_size": 100}, r"block_size=100 must be a power of two from 64 to 2048"),
        ({"block_size": 32}, r"block_size=32 must be a power of two from 64"),
        ({"block_size": 4096}, r"block_size=4096 must be a power of two .* 2048"),
        ({"block_size": 0}, r"block_size=0 must be a power of two"),
        ({"weights": "int3"}, r"weights: 'int3' is not one of fp32, bf16, fp8"),
        ({"local_weights": "fp16"}, r"local_weights: 'fp16' is not one of"),
        ({"grads": ("int9", None)}, r"grads\[0\] \(local\): 'int9' is not one of"),
        ({"grads": (None, "int9")}, r"grads\[1\] \(node\): 'int9' is not one of"),
        ({"grads": ("int8",)}, r"grads=\('int8',\) must name two formats: over local, over node"),
        ({"precise": (("*", "float"),)}, r"precise: 'float' is not one of"),
        ({"grads": ("int8", "int4"), "grads_hops": 1}, r"grads_hops=1 .* same format twice"),
        ({"stage": 0, "weights": "int8"}, r"stage 0 gathers no weights: leave weights"),
        ({"state_spread": "node", "stage": 2}, r"state_spread=\"node\" is for .*: use stage 3, not 2"),
        ({"state_spread": "node", "every": 8}, r"state_spread=\"node\" .* local updates \(every=8\)"),
        ({"stage": 0, "grads": ("int8", "int8")}, r"stage 0 .* use .*stage 1"),
        ({"stage": 2, "hpz": True}, r"stage 2 has no such gather: use stage 3, or drop hpz"),
        ({"stage": 1, "grad_sync": "step"}, r"stage 1 always reduces once per step: leave grad_sync"),
        ({"weights_delta": True}, r"weights_delta .* needs hpz=True"),
        (
            {"weights_delta": True, "hpz": True, "local_weights": "int8"},
            r"local_weights='int8' .* use \"bf16\"",
        ),
        ({"delta_resync": 5}, r"delta_resync=5 .* needs weights_delta=True"),
        ({"delta_resync": -1, "weights_delta": True, "hpz": True}, r"delta_resync=-1 must be 0 or more"),
        ({"error_feedback": True, "grads": ("int8", "int4")}, r"error_feedback .* set grad_sync=\"step\""),
        (
            {"error_feedback": True, "grads": ("int4", "int4"), "grads_hops": 1, "grad_sync": "step"},
            r"error_feedback sits on the node hop: it needs grads_hops=2",
        ),
        ({"grad_sync": "step", "grads_hops": 1}, r"grad_sync=\"step\" .* needs grads_hops=2"),
        ({"rotation": 32}, r"rotation helps quantized gradients only: set grads, or rotation=0"),
        ({"rounding": "stochastic"}, r"stochastic.* set a quantized format in grads"),
        (
            {"error_feedback": True, "grads": ("int8", "fp32"), "grad_sync": "step"},
            r"error_feedback has nothing to feed back.* Set another format in grads",
        ),
        ({"matmul_dtype": "fp16"}, r"matmul_dtype='fp16' is not one of .*fp8"),
        ({"fp8": ("*",)}, r'fp8 names weights of fp8 matmuls: set matmul_dtype="fp8"'),
        ({"matmul_dtype": "fp8", "stage": 2}, r"matmul_dtype=\"fp8\" .* stage 2"),
        (
            {"chunks": 2, "grads_hops": 1},
            r"chunks overlap the two gradient hops, .* set chunks=1, or grads_hops=2",
        ),
        ({"every": 2, "outer_delay": 2}, r"outer_delay=2 with every=2 trains nothing.* a larger every"),
        ({"every": 2, "outer_delay": 3, "outer_mixing": 0.5}, r"outer_delay=3 must be from 0 to every=2"),
    ],
    ids=str,
)
def test_config(options, message):
    with refused(message):
        ZeroConfig(**options)


def test_units_are_classes():
    """One, or several in whichever container."""
    several: Any = (Block, [Block], (Block,))
    for given in several:
        assert ZeroConfig(units=given).units == (Block,)
    with refused(r"units=\('Block',\) must hold classes, and 'Block' is none: .* units=\(Block,\)"):
        ZeroConfig(units=("Block",))  # pyrefly: ignore[bad-argument-type]
    with refused(r"units='Block' must hold classes"):
        ZeroConfig(units="Block")  # pyrefly: ignore[bad-argument-type]


def test_the_formats_of_types_are_those_of_values():
    assert set(get_args(WireFormat)) == {"compute", *FORMATS, *COMPUTE_FORMAT}
    with refused("'int7' is not one of"):
        ZeroConfig(weights="int7")  # pyrefly: ignore[bad-argument-type]  (an editor flags it)


def test_another_mesh_is_the_current_one():
    state = create()
    other = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(other):
        for use in (lambda: zerojax.train_step(state, BATCH), create, lambda: zerojax.gather_params(state)):
            with refused(r"jax\.set_mesh has set a mesh with the axes \('data',\).*Leave the `with` block"):
                use()
    with jax.set_mesh(state.spec.mesh):
        create()
        zerojax.lower_train_step(state, BATCH)


def test_compilation_is_turned_off():
    with jax.disable_jit(), refused(r"jax\.disable_jit .*: a step exists only as a compiled program"):
        create()


def test_unknown_preset():
    with refused(r"no preset 'zero4': there are 'zero3', 'zero\+\+', 'zero\+\+-paper', 'delta'"):
        ZeroConfig.preset("zero4")  # pyrefly: ignore[bad-argument-type]


def test_presets_and_replacements_are_checked_like_any_config():
    assert ZeroConfig.preset("zero++").weight_formats == ("int8", "bf16")
    assert ZeroConfig.preset("delta", rotation=0).rotation == 0
    with refused("stage 2 has no such gather"):
        ZeroConfig.preset("zero++", stage=2)
    with refused("accumulate=-1"):
        ZeroConfig().replace(accumulate=-1)


def test_mesh_extents():
    with refused(r"nodes=0 must be at least 1"):
        zerojax.make_mesh(0, 4)
    with refused(r"local=-2 must be at least 1"):
        zerojax.make_mesh(2, -2)
    many = len(jax.devices()) + 1
    emulate = rf"smaller mesh.* --mesh\.emulate, unless XLA_FLAGS .*force_host_platform_device_count={many}\."
    with refused(rf"nodes={many} x local=1 does not fit .*{emulate}"):
        zerojax.make_mesh(many, 1)
    with refused(rf"nodes={many} x local=0 does not fit .*{emulate}"):
        zerojax.make_mesh(many)
    gpus = [FakeDevice(0, i, "gpu") for i in range(4)]
    with refused("or start more processes\\.$"):
        zerojax.make_mesh(1, 5, devices=gpus)
    with refused(rf"local={many} does not fit"):
        zerojax.make_mesh(local=many)


@dataclass(frozen=True)
class FakeDevice:
    """A device of another process, as far as laying out a mesh goes."""

    process_index: int
    id: int
    platform: str = "cpu"


def test_a_mesh_that_leaves_a_process_out():
    devices = [FakeDevice(i // 2, i) for i in range(4)]
    with refused(r"leaves 2 of 4 devices out, and with 2 processes each must take part. Choose extents"):
        zerojax.make_mesh(1, 2, devices=devices)


def test_mesh_defaults_use_every_device():
    devices = len(jax.devices())
    assert zerojax.make_mesh().shape == {"node": 1, "local": devices}
    assert zerojax.make_mesh(nodes=2).shape == {"node": 2, "local": devices // 2}
    assert zerojax.make_mesh(local=3).shape == {"node": devices // 3, "local": 3}


def create(model: Any = Listed, loss: Any = squared_error, tx: Any = None, **options: Any) -> TrainState:
    """An abstract state: nothing is compiled for, or put on, a device."""
    options = {"units": (Block,), "mesh": (2, 2), "sample_batch": None, **options}
    mesh, sample = options.pop("mesh"), options.pop("sample_batch")
    mesh = zerojax.make_mesh(*mesh) if isinstance(mesh, tuple) else mesh
    zero = ZeroConfig(**options)
    return TrainState.abstract(model, tx or optax.sgd(0.1), loss, mesh=mesh, zero=zero, sample_batch=sample)


class Unused(nnx.Module):
    """Occurs nowhere."""


class UnusedLinen(linen.Module):
    """Occurs nowhere."""


class IntegersOnly(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(jnp.arange(3))


class IntegerParam(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x * self.param("n", lambda _: jnp.int32(3))


class ScannedOverOne(linen.Module):
    """A unit whose layers are stacked along the last axis."""

    @linen.compact
    def __call__(self, x):
        scan = linen.scan(
            lambda block, carry: (block(carry), None),
            variable_axes={"params": 1},
            split_rngs={"params": True},
            length=3,
        )
        return scan(linen.Dense(6, use_bias=False), x)[0]


def test_the_mesh_has_to_be_ours():
    other = jax.make_mesh((2, 2), ("data", "model"))
    with refused(r"axes \('data', 'model'\): make it by zerojax.make_mesh"):
        create(mesh=other)
    arguments: Any = (Listed, optax.sgd(0.1), squared_error)
    with refused("the mesh is a tuple: make it by zerojax.make_mesh"):
        TrainState.abstract(*arguments, mesh=(2, 2))  # pyrefly: ignore[bad-argument-type]
    with refused(r"zero='zero3': give a ZeroConfig"):
        TrainState.abstract(*arguments, mesh=zerojax.make_mesh(2, 2), zero="zero3")  # pyrefly: ignore[bad-argument-type]


def test_a_mesh_with_explicit_axes():
    explicit = jax.make_mesh((2, 2), ("node", "local"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    assert create(mesh=explicit).spec.mesh == create(mesh=zerojax.make_mesh(2, 2)).spec.mesh


def test_options_that_the_mesh_makes_void():
    feedback = {"error_feedback": True, "grads": ("int8", "int4"), "grad_sync": "step"}
    with refused("error_feedback corrects the node hop, and a mesh of one node has none"):
        create(mesh=(1, 4), **feedback)
    with refused("leave chunks at 1"):
        create(chunks=2, **feedback)


def test_weights_of_fp8_matmuls():
    wide = functools.partial(Fp8Model, stacked=False)
    options = {"units": (Fp8Block,), "matmul_dtype": "fp8"}
    state = create(wide, **options, fp8=("*Up*", "!*norm*"))
    assert {leaf.name for leaf in state.spec.leaves if leaf.fp8} == {f"blocks/{i}/up/kernel" for i in (0, 1)}
    with refused(r"fp8: '!\*attention\*' matches no parameter. .* paths are 'blocks/0/"):
        create(wide, **options, fp8=("*kernel", "!*attention*"))
    with refused(r"applies to no weight \(.*'blocks/0/[^']*': not two-dimensional"):
        create(wide, **options, fp8=("*bias",))
    with refused(r"applies to no weight \(.*'blocks/0/.*/kernel': frozen in int8"):
        create(wide, **options, frozen=("*kernel",), frozen_weights="int8")


@pytest.mark.parametrize("units", [(Unused,), (Block, Unused)])
def test_a_unit_that_does_not_occur(units):
    with refused("units: Unused does not occur in the model"):
        create(units=units)


def test_a_linen_unit_that_does_not_occur():
    with refused("units: UnusedLinen does not occur in the model"):
        create(LinenListed(), units=(UnusedLinen,), sample_batch=BATCH)


def test_a_unit_only_inside_another():
    with refused("units: Linear occurs only inside another unit"):
        create(lambda rngs: nnx.List([Block(rngs=rngs)]), units=(Block, nnx.Linear))


def test_models_of_neither_kind():
    with refused("model is a Listed: pass a callable"):
        create(Listed(nnx.Rngs(0)))
    with refused("model is a dict"):
        create({})
    with refused(r"model\(rngs\) returned a \w+, not an nnx.Module. Pass a callable"):
        create(lambda rngs: 3)
    with refused("no floating-point parameters to train"):
        create(IntegersOnly, units=())


def test_sample_batch_is_for_linen_alone():
    with refused(r"pass sample_batch="):
        create(LinenListed(), units=())
    with refused("sample_batch is for Linen modules"):
        create(sample_batch=BATCH)


def test_linen_models_that_cannot_be_split():
    with refused("loss_fn made no parameters: it must call the model"):
        create(LinenListed(), lambda model, batch: jnp.float32(0), units=(), sample_batch=BATCH)
    with refused(r"parameters \['n'\] are not floating-point: keep them in another collection"):
        create(IntegerParam(), units=(), sample_batch=BATCH)
    with refused(r"'.*kernel' of shape .* along an axis other than 0: use variable_axes=\{'params': 0\}"):
        create(ScannedOverOne(), units=(linen.Dense,), sample_batch=BATCH)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: (m(b["x"])[:, 0] - b["y"]) ** 2, r"returned shape \(\d+,\). Take the mean"),
        (lambda m, b: 3.0, "returned a float"),
        (lambda m, b: jnp.int32(3), "floating-point scalar; it returned int32"),
        (
            lambda m, b: (squared_error(m, b), m(b["x"])),
            r"aux must be a dict of scalars.* it is a .*Tracer\. ",
        ),
        (lambda m, b: (squared_error(m, b), {"each": m(b["x"])}), "scalars.* it has 'each'. State that"),
        (lambda m, b: (squared_error(m, b), {"a": {"b": 1.0}}), "aux must be a dict of scalars"),
        (lambda m, b: (squared_error(m, b), {"name": "x"}), "aux must be a dict of scalars"),
        (lambda m, b: (squared_error(m, b), {1: 1.0}), "aux must be a dict of scalars by name.* has 1"),
        (lambda m, b: (squared_error(m, b), {"loss": 1.0}), "aux has 'loss' in it, which is a metric"),
    ],
)
def test_losses_that_are_not_scalars(loss, message):
    state = create(loss=loss)
    with refused(message):
        zerojax.lower_train_step(state, BATCH)
    with refused(message):
        create(LinenListed(), loss, units=(), sample_batch=BATCH)


@pytest.mark.parametrize("rows", [0, 3, 6, 12])
def test_batches_that_do_not_divide(rows):
    state = create(accumulate=2)
    batch = {"x": np.zeros((rows, 6), np.float32), "y": np.zeros(rows, np.float32)}
    with refused(rf"\({rows}, 6\) has {rows} rows, not a positive multiple of 4 devices x accumulate=2"):
        zerojax.lower_train_step(state, batch)
    with refused(rf"{rows} rows, not a positive multiple of 4 devices x accumulate=2"):
        zerojax.train_step(state, batch)


def test_a_batch_without_rows():
    for scalars in ({"x": np.float32(1)}, {"x": 1.0, "y": jnp.float32(2)}):
        with refused("the batch has only scalars"):
            zerojax.train_step(create(), scalars)
        with refused("the batch has only scalars"):
            zerojax.lower_train_step(create(), scalars)
    with refused(r"\(2,\) has 2 rows, not a positive multiple of 4 devices x accumulate=1"):
        zerojax.eval_step(create(accumulate=2), {"x": np.zeros(2, np.float32)})


@pytest.mark.parametrize(
    ("ids", "found"), [(np.full(8, 2**40), 2**40), (-(2**31) - 1, -2147483649), (np.uint64(2**32), 2**32)]
)
def test_integers_that_need_more_bits_than_devices_have(ids, found):
    state = create()
    for step in (zerojax.train_step, zerojax.eval_step):
        with refused(rf"batch\['ids'\] contains {found}, .* 32 bits"):
            step(state, {**BATCH, "ids": ids})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"weights": np.ones(4, np.float32)},
            r"batch\['weights'\] has shape \(4,\), and batch\['x'\] \(8, 6\): .* zerojax\.Replicated",
        ),
        ({"weights": np.ones(5, np.float32)}, r"batch\['weights'\] .* 5 rows.* zerojax\.Replicated"),
        ({"texts": "one"}, r"batch\['texts'\] is of type str: a batch holds arrays"),
        ({"a": ["one", "two"]}, r"batch\['a'\] is a list, .* np\.asarray"),
        ({"a": {"b": [[1, 2], [3, 4]]}}, r"batch\['a'\]\['b'\] is a list, .* np\.asarray"),
        ({"a": zerojax.Replicated([0.5, 2.0])}, r"batch\['a'\]\.value is a list, .* np\.asarray"),
        ({"a": np.array(["b"] * 8)}, r"batch\['a'\] is an array of dtype <U1, which no device can hold"),
        ({"a": np.zeros(8, ">i8")}, r"batch\['a'\] is an array of dtype >i8, which no device can hold"),
        ({"a": object()}, r"batch\['a'\] is of type object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_batches_that_are_no_rows_of_numbers(more, message):
    state = create()
    for step in (zerojax.train_step, zerojax.eval_step, zerojax.lower_train_step, zerojax.comm_report):
        with refused(message):
            step(state, {**BATCH, **more})


@pytest.mark.parametrize("step", [zerojax.train_step, zerojax.eval_step])
def test_a_step_inside_jit(step):
    batch = {"x": np.zeros((4, 6), np.float32), "y": np.zeros(4, np.float32)}
    with refused("Call them outside jax.jit"):
        jax.jit(step)(create(), batch)


def test_an_abstract_state_has_no_values():
    with refused("the state is abstract: make it by TrainState.create"):
        zerojax.train_step(create(), BATCH)
    with refused("the state is abstract"):
        zerojax.gather_params(create())


def test_a_stack_without_layers():
    with refused("Stack: layers=0 must be at least 1"):
        zerojax.Stack(Block, 0, rngs=nnx.Rngs(0))


def test_a_stack_of_a_block_that_exists_already():
    block = Block(rngs=nnx.Rngs(0))
    with refused("Stack: block.* returned a module.* that was created before"):
        zerojax.Stack(lambda rngs: block, 2, rngs=nnx.Rngs(0))
    with refused("block is a Block that exists already: give its class"):
        zerojax.Stack(block, 2, rngs=nnx.Rngs(0))


def test_put_params_of_another_model():
    state = CASES["nnx"].create(optax.sgd(0.1), nodes=1, local=2)
    params = zerojax.gather_params(state)
    with refused(r"missing or unknown: last/bias"):
        zerojax.put_params(state, {**params, "last": {"kernel": params["last"]["kernel"]}})
    with refused(r"missing or unknown: more"):
        zerojax.put_params(state, {**params, "more": np.zeros(3)})
    with refused("params is a State, not a dict"):
        zerojax.put_params(state, nnx.state(Block(rngs=nnx.Rngs(0))))
    odd = {"kernel": params["last"]["kernel"].T, "bias": params["last"]["bias"]}
    with refused(re.escape("'last/kernel' has shape (1, 6), not (6, 1)")):
        zerojax.put_params(state, {**params, "last": odd})


class ReadsWeights(nnx.Module):
    """Reads a unit's weight without calling the unit."""

    def __init__(self, rngs: nnx.Rngs, read: Callable[[nnx.Param], Any]):
        self.block = Block(rngs=rngs)
        self.read = read

    def __call__(self, x):
        return x @ self.read(self.block.up.kernel)


@pytest.mark.parametrize("read", [lambda w: w[...], lambda w: w.get_value(), lambda w: jnp.asarray(w)])
def test_a_units_weight_read_outside_its_calls(read):
    state = create(functools.partial(ReadsWeights, read=read))
    with refused(r"'block/up/kernel' is sharded .* leave its class out of ZeroConfig\.units"):
        zerojax.lower_train_step(state, BATCH)


def test_breadth_without_units():
    with refused(r"no unit is named: name the model's block classes in ZeroConfig\.units"):
        create(units=(), accumulate=2, accumulate_order="breadth")


def test_one_big_unit_says_so_once():
    with pytest.warns(UserWarning, match="no unit is named, so the whole model is gathered at once") as said:
        create(units=())
    assert len(said) == 1
    create()
    create(units=(), stage=2)


def test_collections_pause_while_a_loss_is_traced() -> None:
    """An error in the loss does not leave them paused."""
    paused: list[bool] = []

    def loss(model: Any, batch: Any) -> jax.Array:
        paused.append(not gc.isenabled())
        raise ZeroDivisionError

    case = CASES["nnx"]
    state = TrainState.abstract(
        case.model, None, loss, mesh=zerojax.make_mesh(1, 1), zero=ZeroConfig(units=case.units)
    )
    with pytest.raises(ZeroDivisionError):
        lower_eval_step(state, BATCH)
    assert paused == [True]
    assert gc.isenabled()
