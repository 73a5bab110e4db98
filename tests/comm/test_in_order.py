"""Tests of zerojax/comm/in_order.py."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environment import ROOT, for_programs
from jax import lax
from jax.extend import core

import zerojax
from zerojax.comm.in_order import collective_axes, on_mesh
from zerojax.sharding.mesh import AXES, LOCAL

STEPS = """
import sys
import jax, optax
sys.path.insert(0, "tests/helpers")
from core_models import CASES
import zerojax

case, losses = CASES["gpt-tied"], []
for stage in (3, 1):
    state = case.create(optax.sgd(0.1), nodes=1, local=4, stage=stage)
    (batch,) = case.batches(64, 1)
    for _ in range(100):
        state, metrics = zerojax.train_step(state, batch)
    losses.append(float(metrics["loss"]))
assert abs(losses[0] - losses[1]) < 1e-5, losses
"""


@pytest.mark.slow
def test_emulated_devices_do_not_wait_for_each_other_forever():
    """Stage 1 gathers a stack in a loop, and the embedding beside it: devices took them in different orders,
    which ended in a hang or, where two gathers were taken for one, in a wrong loss. A loop that reads no
    result hung as well, once XLA:CPU took no more programs."""
    environment = for_programs() | {"PYTHONPATH": os.fspath(ROOT)}
    environment["XLA_FLAGS"] += (
        " --xla_force_host_platform_device_count=4 --xla_cpu_collective_call_terminate_timeout_seconds=60"
    )
    subprocess.run([sys.executable, "-c", STEPS], env=environment, cwd=ROOT, check=True, timeout=300)


def gathered(x):
    return lax.all_gather(x, LOCAL, tiled=True)


def loop(x):
    """Sums of gathers in a loop."""
    return lax.scan(lambda total, _: (total + gathered(x).sum(), None), 0.0, length=3)[0]


@jax.custom_vjp
def own_gradient(x):
    return loop(x)


own_gradient.defvjp(lambda x: (loop(x), x), lambda x, g: (g * x,))


def gathers(x, y):
    return gathered(x), lax.psum(x[:0], AXES), gathered(y)


def sums(x, y):
    return lax.psum((x, 1j * x, y), AXES)


def beside_a_loop(x, y):
    return loop(x), gathered(y)


def loop_after_gathers(x, y):
    return gathered(y), loop(x)


def loop_beside_a_loop(x, y):
    return loop(x), loop(y)


def loops_in_a_loop(x, y):
    def both(total, _):
        return total + loop(x) + gathered(y).sum() + loop(y), None

    return lax.scan(both, 0.0, length=2)[0], loop(y)


def gathers_in_a_loop(x, y):
    def both(total, _):
        return total + gathered(x).sum() + gathered(y).sum(), None

    return lax.scan(both, 0.0, length=2)[0]


def loop_that_is_given_what_it_does_not_read(x, y):
    other = gathered(y)
    return lax.scan(lambda total, _: (total + gathered(x).sum(), None), 0.0, other), other


def loop_of_which_one_result_is_read(x, y):
    def both(totals, _):
        return (totals[0] + gathered(x).sum(), totals[1] + gathered(y).sum()), None

    one, other = lax.scan(both, (0.0, 0.0), length=1)[0]
    return gathered(one * x), other


def in_calls(x, y):
    return jax.jit(loop)(x), own_gradient(y), jax.checkpoint(gathers)(x, y), gathered(y)


def in_gradients(x, y):
    return jax.grad(lambda x, y: own_gradient(x) + jax.checkpoint(loop)(y), (0, 1))(x, y), gathered(y)


def in_branches(x, y):
    return lax.cond(lax.axis_index(LOCAL) < 9, loop, lambda x: x.sum(), x), gathered(y)


def until_with_a_bool(x, y):
    def step(given):
        return given[0] + 1, given[1] + gathered(x).sum(), ~given[2]

    return lax.while_loop(lambda given: given[0] < 3, step, (0, 0.0, True)), gathered(y)


def until(x, y):
    def step(given):
        return given[0] + 1, given[1] + gathered(x).sum()

    return lax.while_loop(lambda given: given[0] < 3, step, (0, 0.0)), gathered(y), y[:0], y.astype(jnp.bool_)


PROGRAMS = [
    gathers,
    sums,
    beside_a_loop,
    loop_after_gathers,
    loop_beside_a_loop,
    loops_in_a_loop,
    gathers_in_a_loop,
    loop_that_is_given_what_it_does_not_read,
    loop_of_which_one_result_is_read,
    in_calls,
    in_gradients,
    in_branches,
    until_with_a_bool,
    until,
]


SPEC = jax.P(AXES)


def rows(program):
    """The program, whose results have an axis to be put together on."""
    return lambda *args: jax.tree.map(jnp.atleast_1d, program(*args))


def equations(mapped):
    """The equations that a mapped function of two rows runs on each device."""
    x = jax.ShapeDtypeStruct((8,), np.float32)
    (outer,) = jax.make_jaxpr(mapped)(x, x).jaxpr.eqns
    return outer.params["jaxpr"].eqns


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_in_order_compute_the_same(program):
    mesh = zerojax.make_mesh(2, 2)
    xs = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    got = on_mesh(rows(program), mesh, in_specs=SPEC, out_specs=SPEC)
    # XLA runs programs of arrays this small in order anyway.
    wanted = jax.shard_map(rows(program), mesh=mesh, check_vma=False, in_specs=SPEC, out_specs=SPEC)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(got)(*xs), jax.jit(wanted)(*xs))


def test_empty_arguments_do_not_crash_the_compiler():
    """As in plain JAX 0.11.2, where a process that compiles such a program ends."""
    mesh = zerojax.make_mesh(2, 1)
    run = on_mesh(lambda x, y: (x, x.sum() + gathered(y)), mesh, in_specs=SPEC, out_specs=SPEC)
    empty, after = jax.jit(run)(np.zeros((4, 0), "f4"), np.ones(4, "f4"))
    assert empty.shape == (4, 0)
    assert after.sum() == 4


def conflicts(eqns):
    """How many pairs of collectives, or of loops and other blocks with some, do not wait for each other."""
    ours = [eqn for eqn in eqns if communicates(eqn) and not_empty(eqn.outvars)]
    # XLA has no sum of several arrays.
    found = sum(len(eqn.invars) - 1 for eqn in ours if collective_axes(eqn))
    for i, later in enumerate(ours):
        needed = needs(eqns, later)
        found += sum(not needed.issuperset(not_empty(earlier.outvars)) for earlier in ours[:i])
    inner = [each for eqn in eqns for each in core.jaxprs_in_params(eqn.params)]
    return found + sum(conflicts(each.eqns) for each in inner)


def not_empty(variables):
    return [var for var in variables if var.aval.size]


def communicates(eqn):
    inner = core.jaxprs_in_params(eqn.params)
    return bool(collective_axes(eqn)) or any(communicates(each) for jaxpr in inner for each in jaxpr.eqns)


def needs(eqns, eqn):
    """The variables that an equation needs."""
    made_by = {var: each for each in eqns for var in each.outvars}
    found, pending = set(), [eqn]
    while pending:
        new = set(reads(pending.pop())) - found
        found |= new
        pending += [made_by[var] for var in new if var in made_by]
    return found


def reads(eqn):
    """The variables that an equation reads; of a scan's, those that its body reads."""
    read = [True] * len(eqn.invars)
    if eqn.primitive.name == "scan":
        body = eqn.params["jaxpr"].jaxpr
        read = [any(var is other for each in body.eqns for other in each.invars) for var in body.invars]
    found = [var for var, is_read in zip(eqn.invars, read, strict=True) if is_read]
    return [var for var in found if not isinstance(var, core.Literal)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_collectives_wait_for_those_before(program):
    mesh = zerojax.make_mesh(2, 2)
    plain = jax.shard_map(rows(program), mesh=mesh, check_vma=False, in_specs=SPEC, out_specs=SPEC)
    assert conflicts(equations(plain)) > 0
    assert conflicts(equations(on_mesh(rows(program), mesh, in_specs=SPEC, out_specs=SPEC))) == 0


def test_what_reads_the_results_waits_for_the_last_collective():
    mesh = zerojax.make_mesh(2, 2)
    eqns = equations(on_mesh(rows(lambda x, y: (gathered(x), 2 * y)), mesh, in_specs=SPEC, out_specs=SPEC))
    (gather,) = (eqn for eqn in eqns if communicates(eqn))
    made_last = [eqn for eqn in eqns if eqn.primitive.name == "select_n"]
    assert made_last
    assert all(needs(eqns, eqn).issuperset(gather.outvars) for eqn in made_last)


def test_what_waits_anyway_is_left_alone():
    mesh = zerojax.make_mesh(2, 2)
    mapped = on_mesh(lambda x: gathered(2 * gathered(x)), mesh, in_specs=SPEC, out_specs=SPEC)
    assert "select_n" not in str(jax.make_jaxpr(mapped)(np.zeros(8, np.float32)))


def test_programs_for_gpus_stay_as_they_are(cuda_mesh):
    mapped = on_mesh(rows(beside_a_loop), cuda_mesh(1, 2), in_specs=SPEC, out_specs=SPEC)
    names = [eqn.primitive.name for eqn in equations(mapped)]
    assert "scan" in names
    assert "select_n" not in names
