"""``attend_cache`` against softmax written out in NumPy, and on a GPU, if there is one, its kernel."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import has_gpu

import pallas_kernels as pk


@dataclass(frozen=True)
class Case:
    """Heads that are shared, widths that are no power of two, rows that are split, a softcap, sinks."""

    rows: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    softcap: float | None = None
    scale: float = 0.3
    layer: int = 1
    sinks: bool = False

    @property
    def sink(self):
        """Of each head."""
        return np.linspace(-2, 4, self.heads, dtype=np.float32) if self.sinks else None

    @property
    def arrays(self):
        """Query, keys, values, and which columns each row sees: one, all, some."""
        rng = np.random.default_rng(self.length)
        cache = (2, self.rows, self.kv_heads, self.length, self.dim)
        query = 3 * rng.standard_normal((self.rows, self.heads, self.dim), np.float32)
        keys, values = rng.standard_normal((2, *cache), np.float32)
        stop = rng.integers(1, self.length + 1, self.rows).astype(np.int32)
        stop[0] = self.length
        stop[1:2] = 1
        start = rng.integers(0, stop).astype(np.int32)
        start[1:2] = 0
        return query, keys, values, start, stop

    def run(self, query, keys, values, start, stop):
        """The function that is tested."""
        return pk.attend_cache(
            *(query, keys, values, self.layer, start, stop),
            None if self.sink is None else jnp.asarray(self.sink),
            scale=self.scale,
            softcap=self.softcap,
        )

    @property
    def expected(self):
        """In fp64, column by column."""
        query, keys, values, start, stop = self.arrays
        out = np.zeros(query.shape)
        for row in range(self.rows):
            for head in range(self.heads):
                own = self.layer, row, head // (self.heads // self.kv_heads), slice(start[row], stop[row])
                scores = self.scale * keys[own].astype(float) @ query[row, head]
                if self.softcap is not None:
                    scores = self.softcap * np.tanh(scores / self.softcap)
                sink = -np.inf if self.sink is None else self.sink[head]
                most = max(scores.max(), sink)
                weights = np.exp(scores - most)
                out[row, head] = weights @ values[own] / (weights.sum() + np.exp(sink - most))
        return out


CASES = [Case(3, 4, 4, 13, 8), Case(2, 6, 2, 40, 20, softcap=2.0), Case(2, 6, 2, 40, 20, sinks=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_softmax_written_out(case):
    np.testing.assert_allclose(case.run(*map(jnp.asarray, case.arrays)), case.expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": (3, 4)}, ValueError, "pass"),
        ({"query": (3, 5, 8)}, ValueError, "heads"),
        ({"query": (2, 4, 8)}, ValueError, "rows"),
        ({"start": (2,)}, TypeError, "start"),
    ],
)
def test_bad_input_is_named(change, error, message):
    query, keys, values, start, stop = CASES[0].arrays
    given = {"query": query, "start": start}
    given |= {name: np.zeros(shape, given[name].dtype) for name, shape in change.items()}
    arrays = map(jnp.asarray, (given["query"], keys, values, given["start"], stop))
    with pytest.raises(error, match=message):
        CASES[0].run(*arrays)


def test_dtypes_are_those_of_the_cache():
    query, *others = map(jnp.asarray, CASES[0].arrays)
    with pytest.raises(TypeError, match="bfloat16"):
        CASES[0].run(query.astype(jnp.bfloat16), *others)


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        Case(64, 32, 32, 384, 128),
        Case(2, 16, 2, 3000, 128, sinks=True),
        Case(1, 28, 4, 5000, 96, 20.0),
        Case(4, 64, 1, 700, 256),
    ],
    ids=str,
)
@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device in this process")
def test_kernel_equals_softmax_written_out(case):
    query, keys, values, start, stop = (jnp.asarray(x) for x in case.arrays)
    query, keys, values = (x.astype(jnp.bfloat16) for x in (query, keys, values))
    program = jax.jit(case.run).lower(query, keys, values, start, stop).as_text()
    assert "triton_kernel_call" in program
    got, want = np.asarray(case.run(query, keys, values, start, stop), float), case.expected
    assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)
