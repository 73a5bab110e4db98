"""Pallas kernels for Hopper and newer, through Pallas' Mosaic GPU backend, which only needs jax."""

from functools import cache

from jax.experimental.mosaic.gpu import fragmented_array


def _ask_ptxas_once() -> None:
    """Cache ptxas's version. Without this, Mosaic starts ptxas for every conversion of 8 bits or booleans.

    Each start takes 5 to 15 ms. Together they were half of the time to lower a kernel.
    """
    library = fragmented_array.mgpu_lib
    extension = getattr(library, "_mosaic_gpu_ext", None)
    if (ask := getattr(extension, "_get_ptxas_isa_version", None)) is not None:
        setattr(extension, "_get_ptxas_isa_version", cache(ask))  # noqa: B010  (a private name of JAX)


_ask_ptxas_once()
