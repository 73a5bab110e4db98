"""pallas_kernels.lowered: a kernel is lowered once, and later processes read it from a store."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from kernel_cases import has_gpu

import pallas_kernels as pk
from pallas_kernels import backends, lowered


class Memory(dict[str, bytes]):
    """A store, with the reasons why it had to drop something."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    def put(self, key: str, value: bytes) -> None:
        self[key] = value

    def drop(self, key: str, why: str) -> None:
        self.dropped.append(why)
        del self[key]


@pytest.fixture
def store() -> Iterator[Memory]:
    kept = Memory()
    pk.keep_lowered(kept)
    yield kept
    pk.keep_lowered(None)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A kernel for ``encode``, and the settings of each time that it was traced."""
    seen: list[dict[str, Any]] = []

    def kernel(x: jax.Array, seed: jax.Array | None, **static: Any) -> jax.Array:
        seen.append(static)
        return jnp.zeros((len(x), pk.nbytes(static["fmt"], x.shape[1], static["block"])), jnp.uint8)

    monkeypatch.setattr(backends, "cuda_kernels", lambda name: [kernel] if name == "encode" else [])
    backends._implementation.cache_clear()
    yield seen
    backends._implementation.cache_clear()


def text(platform: str | None, rows: int = 2, fmt: str = "int8", lower_for: str = "cuda") -> str:
    """The program of ``encode``, as a process lowers it that has lowered nothing before."""
    backends._implementation.cache_clear()
    lowered._known.clear()

    def program(x: jax.Array) -> jax.Array:
        with pk.for_platform(platform):
            return pk.encode(x, fmt, block=64)

    like = jax.ShapeDtypeStruct((rows, 128), jnp.float32)
    return jax.jit(program).trace(like).lower(lowering_platforms=(lower_for,)).as_text()


def test_a_later_process_reads_the_kernel_and_has_the_same_program(store: Memory, traces: list[Any]) -> None:
    first = text("cuda")
    assert len(traces) == len(store) == 1
    assert text("cuda") == first
    assert len(traces) == 1


def test_other_shapes_settings_chips_or_sources_are_other_kernels(
    store: Memory, traces: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text("cuda")
    text("cuda", rows=3)
    text("cuda", fmt="int4")
    monkeypatch.setattr(backends, "compute_capability", lambda: 80)
    text("cuda")
    monkeypatch.setattr(lowered, "_environment", lambda: ([], "other sources"))
    text("cuda")
    assert len(traces) == len(store) == 5


def test_a_damaged_kernel_is_dropped_and_lowered_again(store: Memory, traces: list[Any]) -> None:
    first = text("cuda")
    (key,) = store
    store[key] = b"damaged"
    assert text("cuda") == first
    assert len(traces) == 2
    assert len(store.dropped) == 1


def test_the_environment_names_the_versions_and_follows_the_sources() -> None:
    versions, digest = lowered._environment()
    assert {"jax", "jaxlib"} <= {name for name, _ in versions}
    assert len(digest) == 64


@pytest.mark.usefixtures("store")
def test_only_the_implementation_of_the_platform_is_traced(
    traces: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_any = text(None)
    assert len(traces) == 1
    monkeypatch.setattr(backends.reference, "encode", None)  # tracing it would fail
    assert text("cuda")
    with pytest.raises(TypeError):
        text(None)
    monkeypatch.undo()
    traces.clear()
    assert text("cpu", lower_for="cpu") != of_any
    assert not traces


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device in this process")
@pytest.mark.parametrize("rotation", [0, 32])
def test_kernels_from_the_store_compute_the_same_bits(store: Memory, rotation: int) -> None:
    x = jax.random.normal(jax.random.key(0), (4, 4096))
    wanted = pk.encode(x, "int4", block=128, rotation=rotation)
    for _ in range(2):
        backends._implementation.cache_clear()
        lowered._known.clear()
        with pk.for_platform("cuda"):
            assert (pk.encode(x, "int4", block=128, rotation=rotation) == wanted).all()
    assert len(store) == 1
