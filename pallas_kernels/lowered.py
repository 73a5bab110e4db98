"""Kernels in lowered form, which a later process reads from a store instead of lowering them again.

A kernel is Python that Triton or Pallas translates, for up to a second each. Its lowered form is an exported
JAX function of about 20 KB (``jax.export``), found by the kernel's name, its settings, shapes and dtypes, the
chip, the versions of the packages that lower it, and the sources of this package.
"""

import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import jax
from jax import export
from jax.sharding import AbstractMesh

_PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "flatbuffers")
_CUSTOM_CALLS = ("triton_kernel_call", "mosaic_gpu_v2")
"""How XLA calls Triton's and Pallas' kernels. JAX exports them on request, because they may change."""


class Store(Protocol):
    """Keeps bytes by key. Implementations do not raise if they cannot read or write."""

    def get(self, key: str, /) -> bytes | None:
        """The bytes of a key; None if there are none."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Keep bytes."""
        ...

    def drop(self, key: str, why: str) -> None:
        """Remove the bytes of a key, which cannot be used."""
        ...


_store: Store | None = None
_known: dict[str, Callable[..., Any]] = {}


def keep_lowered(store: Store | None) -> None:
    """Keep kernels in a store after lowering, and read from it the ones that are there.

    This holds for kernels that are called within ``for_platform("cuda")``. None ends it. Whoever can write to
    the store can make this process run code.

    Raises:
        ModuleNotFoundError: the package flatbuffers is missing.
    """
    global _store
    import flatbuffers  # noqa: F401  # JAX needs it to read and write

    _store = store
    _known.clear()


def lowered(
    name: str,
    kernel: Callable[..., Any],
    static: Mapping[str, Any],
    arrays: tuple[jax.Array | None, ...],
    capability: int,
) -> Callable[..., Any]:
    """A function of the arrays that calls the kernel with its settings, on a chip of a compute capability.

    The lowered kernel comes from the store of ``keep_lowered``, if there is one.
    """

    def run(*arrays: jax.Array | None) -> Any:
        return kernel(*arrays, **static)

    if _store is None:
        return run
    like = [None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    key = _key(name, dict(sorted(static.items())), like, capability, jax.config.jax_enable_x64)
    if key not in _known:
        # Compiled once however often it is called: JAX recognises it by its identity.
        _known[key] = jax.jit(_exported(_store, key, run, like).call)
    return _known[key]


def _exported(
    store: Store, key: str, run: Callable[..., Any], like: list[jax.ShapeDtypeStruct | None]
) -> export.Exported:
    if (found := store.get(key)) is not None:
        try:
            return export.deserialize(bytearray(found))
        except Exception as error:
            store.drop(key, f"cannot be read ({type(error).__name__})")
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in _CUSTOM_CALLS]
    # The caller may be inside a mesh, and a kernel belongs to none. Its chip may only be described there.
    alone = AbstractMesh((), (), abstract_device=jax.sharding.get_abstract_mesh().abstract_device)
    with jax.sharding.use_abstract_mesh(alone):
        made = export.export(jax.jit(run), platforms=["cuda"], disabled_checks=checks)(*like)
    store.put(key, bytes(made.serialize()))
    return made


def _key(*parts: object) -> str:
    text = repr((parts, _environment()))
    return f"kernel-{hashlib.sha256(text.encode()).hexdigest()}"


@cache
def _environment() -> tuple[list[tuple[str, str]], str]:
    """What a lowered kernel depends on besides its arguments: versions, and this package's sources."""
    installed = {found.name: found.version for found in metadata.distributions() if found.name in _PACKAGES}
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return (sorted(installed.items()), digest.hexdigest())
