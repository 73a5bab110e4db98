"""Compile every Mosaic kernel to machine code for an absent H100."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mosaic_cases import call, calls_of

from pallas_kernels.mosaic import calls
from zerojax import aot


def main() -> None:
    """Compile the calls of every format, rows that begin at even and at odd places."""
    mesh = Mesh(np.array(aot.topology(1, 1, gpu="h100")), ("device",))
    replicated = NamedSharding(mesh, P())
    count = 0
    for fmt, block, rows, n in (("int8", 256, 2, 256 * 24), ("int4", 64, 3, 704), ("fp8", 2048, 1, 2048 * 8)):
        for name, arrays, static in calls_of(fmt, block, rows, n):
            kinds = [
                array
                if array is None
                else jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=replicated)
                for array in arrays
            ]
            program = jax.jit(lambda *a, name=name, static=static: call(calls, name, a, static))
            text = program.lower(*kinds).compile().as_text()
            assert text is not None
            assert "mosaic_gpu" in text, (name, static)
            count += 1
    rows, k, n, groups = 999, 192, 320, 5
    shapes = {"x": (rows, k), "w": (groups, k, n), "g": (rows, n)}
    kind = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=replicated) for name, s in shapes.items()}
    kind["sizes"] = jax.ShapeDtypeStruct((groups,), jnp.int32, sharding=replicated)
    for name, arrays, static in (
        ("grouped_rows", ("x", "w", "sizes"), {"transposed": False}),
        ("grouped_rows", ("g", "w", "sizes"), {"transposed": True}),
        ("grouped_sums", ("x", "g", "sizes"), {}),
    ):
        program = jax.jit(lambda *a, name=name, static=static: call(calls, name, a, static))
        text = program.lower(*(kind[array] for array in arrays)).compile().as_text()
        assert text is not None
        assert "mosaic_gpu" in text, (name, static)
        count += 1
    shapes = (((rows, 256), jnp.float8_e5m2), ((groups, 384, 256), jnp.float8_e4m3fn))
    given = [jax.ShapeDtypeStruct(*shape, sharding=replicated) for shape in (*shapes, ((), jnp.float32))]
    program = jax.jit(partial(calls.grouped_rows_fp8, transposed=True, dtype=jnp.dtype(jnp.bfloat16)))
    text = program.lower(*given[:2], kind["sizes"], given[2]).compile().as_text()
    assert text is not None
    assert "mosaic_gpu" in text
    count += 1
    print(f"compiled {count} kernels")

    def layers(x: jax.Array, stack: jax.Array, sizes: jax.Array) -> jax.Array:
        """Every layer of a stack in turn, as when making tokens."""

        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            for transposed in (False, True):
                product = calls.grouped_rows(x, w, sizes, transposed=transposed)
                assert product is not None
                x = product
            return x, None

        return jax.lax.scan(layer, x, stack)[0]

    kind["x"] = jax.ShapeDtypeStruct((7, k), jnp.bfloat16, sharding=replicated)
    kind["w"] = jax.ShapeDtypeStruct((4, groups, k, n), jnp.bfloat16, sharding=replicated)
    text = jax.jit(layers).lower(kind["x"], kind["w"], kind["sizes"]).compile().as_text() or ""
    assert text.count("kind=kCustom, calls=%dynamic-slice-fusion") == 2, "the kernels read a copy of a layer"


if __name__ == "__main__":
    main()
