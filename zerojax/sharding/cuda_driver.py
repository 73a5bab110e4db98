"""What CUDA's driver does and JAX does not offer: copies to page-locked host memory, the state of contexts.

A GPU copies from and to such memory at the full rate of PCI Express, while it computes. JAX copies an array
to page-locked memory by a program, which waits until the GPU has done all steps that were dispatched before.
It copies from other memory at a tenth of the rate.
"""

import ctypes
import functools
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import contextmanager

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, UInt8

from zerojax.errors import RunError
from zerojax.sharding.mesh import on_gpus

# Values of the driver's CUmemHostRegister_flags and CUstream_flags.
_PORTABLE = ctypes.c_uint(1)  # locked for the contexts of all devices
_NON_BLOCKING = ctypes.c_uint(1)  # waits for no other stream


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    """Call a function of the driver.

    Raises:
        RunError: it failed.
    """
    if code := getattr(_library(), name)(*arguments):
        text = ctypes.c_char_p()
        _library().cuGetErrorString(code, ctypes.byref(text))
        raise RunError(f"CUDA's {name} failed: {(text.value or b'error').decode()} ({code})")


@contextmanager
def _context(number: int) -> Generator[None]:
    """Use the primary context of a GPU, which is XLA's, in this thread."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), number)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(context))
        _call("cuDevicePrimaryCtxRelease_v2", device)


def contexts_work(mesh: Mesh) -> bool:
    """Whether this process can still use its GPUs; true on a mesh of CPUs.

    A context is lost for good after an illegal access to memory. Under NVIDIA's Multi-Process Service the
    contexts of all processes are lost, even if they compute nothing.
    """
    devices = mesh.local_devices if on_gpus(mesh.devices.flat) else ()
    try:
        for device in devices:
            with _context(device.local_hardware_id):
                _call("cuCtxSynchronize")
    except RunError:
        return False
    return True


@contextmanager
def page_locked(memory: UInt8[np.ndarray, " bytes"], mesh: Mesh) -> Generator[None]:
    """Lock the pages of some host memory within a block, for the GPUs of this process.

    Does nothing on a mesh of CPUs.

    Raises:
        RunError: the driver cannot lock the memory.
    """
    if not on_gpus(mesh.devices.flat):
        yield
        return
    address, number = _address(memory), mesh.local_devices[0].local_hardware_id
    with _context(number):
        _call("cuMemHostRegister_v2", address, ctypes.c_size_t(memory.nbytes), _PORTABLE)
    try:
        yield
    finally:
        with _context(number):
            _call("cuMemHostUnregister", address)


def copy_to_host(parts: Iterable[tuple[Array, UInt8[np.ndarray, " bytes"]]]) -> None:
    """Copy arrays of one GPU each to host memory, all at once, and wait until they are there.

    Args:
        parts: arrays, which have been computed and are not donated meanwhile; and memory of their size, which
            should be ``page_locked``.

    Raises:
        RunError: the driver fails.
    """
    by_number = defaultdict[int, list[tuple[Array, np.ndarray]]](list)
    for x, target in parts:
        (device,) = x.devices()
        by_number[device.local_hardware_id].append((x, target))
    for number, own in by_number.items():
        with _context(number):
            stream = ctypes.c_void_p()
            _call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
            for x, target in own:
                source = ctypes.c_uint64(x.unsafe_buffer_pointer())
                _call("cuMemcpyDtoHAsync_v2", _address(target), source, ctypes.c_size_t(x.nbytes), stream)
            _call("cuStreamSynchronize", stream)
            _call("cuStreamDestroy_v2", stream)


def _address(memory: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(memory.ctypes.data)
