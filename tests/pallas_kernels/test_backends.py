"""pallas_kernels.backends: the first kernel that supports the arguments computes the result."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backends, grouped_reference, reference

OPTIONS: dict[str, Any] = {"block": 64, "rounding": "nearest"}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Modules in place of Pallas' kernels and of Triton's."""
    pallas, triton = SimpleNamespace(), SimpleNamespace()
    monkeypatch.setattr(backends, "_pallas_module", lambda: pallas)
    monkeypatch.setattr(backends, "_triton_module", lambda: triton)
    return pallas, triton


@pytest.mark.parametrize(
    ("pallas", "triton", "wanted"), [("p", "t", "p"), (None, "t", "t"), (None, None, None)]
)
def test_kernels_are_asked_in_turn(kernels, pallas, triton, wanted):
    for module, result in zip(kernels, (pallas, triton), strict=True):
        module.encode = lambda *_, result=result, **__: result
    x = jnp.arange(128.0).reshape(1, 128)
    found = backends.on_cuda("encode")(x, None, fmt="int8", rotation=0, **OPTIONS)
    if wanted is not None:
        assert found == wanted
    else:
        np.testing.assert_array_equal(found, reference.encode(x, None, fmt="int8", rotation=0, **OPTIONS))


def test_triton_decodes_although_pallas_could(kernels):
    pallas, triton = kernels
    pallas.decode = lambda *_, **__: "p"
    assert len(backends.cuda_kernels("decode")) == 1
    triton.decode = lambda *_, **__: "t"
    assert backends.on_cuda("decode")(jnp.zeros((1, 66), jnp.uint8)) == "t"


def test_what_no_kernel_computes_is_composed_of_other_kernels(kernels):
    """The sum of 65 payloads, and fp8 matrices with sides that no fp8 kernel supports."""
    called: list[str] = []
    for name, specification in (
        ("decode_sum", reference), ("encode", reference), ("grouped_rows", grouped_reference)
    ):  # fmt: skip

        def kernel(*arrays, name=name, specification=specification, **static):
            called.append(name)
            return getattr(specification, name)(*arrays, **static)

        setattr(kernels[1], name, kernel)
    payload = reference.encode(jnp.ones((65, 128)), None, fmt="int8", rotation=0, **OPTIONS)
    static: dict[str, Any] = {"fmt_in": "int8", "fmt_out": "int4", "rows_out": 2, "n": 64, **OPTIONS}
    found = backends.on_cuda("decode_sum_encode")(payload, None, **static)
    np.testing.assert_array_equal(found, reference.decode_sum_encode(payload, None, **static))
    rows, matrices = (jnp.ones(shape, jnp.float8_e4m3fn) for shape in ((3, 16), (1, 16, 8)))
    given = rows, matrices, jnp.array([3], jnp.int32), jnp.float32(0.5)
    out = backends.on_cuda("grouped_rows_fp8", grouped_reference)(
        *given, transposed=False, dtype=jnp.dtype(jnp.bfloat16)
    )
    np.testing.assert_array_equal(np.float32(out), np.full((3, 8), 8))
    assert called == ["decode_sum", "encode", "grouped_rows"]


def test_without_kernels_there_is_nothing_to_ask(monkeypatch):
    monkeypatch.setattr(backends, "_pallas_module", lambda: None)
    monkeypatch.setattr(backends, "_triton_module", lambda: None)
    assert not backends.cuda_kernels("decode_sum_encode")
