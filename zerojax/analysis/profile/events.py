"""The device events of a trace, read by ``jax.profiler``."""

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from jax.profiler import ProfileData

from zerojax.errors import ConfigurationError

# The named scopes of weights.py, comm/reduction.py, schedule/unit.py, optim/muon.py, and modules of train/.
HOPS = (
    *("gather_node", "gather_local", "gather_delta", "gather_exact", "all_gather_sum"),
    *("reduce_local", "reduce_node", "sums_to_nodes", "exchange_fragment", "orthogonalise"),
)
SCOPES = (*HOPS, "encode_gradients", "optimizer", "outer_update", "layer")
_COLLECTIVE = re.compile(
    r"(ragged[-_])?(all|reduce|collective)[-_](gather|reduce|to[-_]all|scatter|permute|broadcast)"
)

_BYTES = 2  # the wire type of strings, bytes and messages

# Field numbers from XSpace to an XStat's bytes_value.
_PLANES, _PLANE_NAME, _EVENT_METADATA, _MAP_VALUE, _METADATA_NAME = 1, 2, 4, 2, 2
_METADATA_STATS, _STAT_BYTES = 5, 6
# From HloProto to an instruction, and in it.
_MODULE, _COMPUTATIONS, _INSTRUCTIONS = 1, 3, 2
_NAME, _OPCODE, _METADATA, _OP_NAME = 1, 2, 7, 2

Instructions = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Event:
    """One kernel, copy or call of a device.

    Attributes:
        device: its index.
        line: the stream or thread that it ran on.
        name: of the kernel or instruction.
        scope: one of ``SCOPES``, followed by " backward" in the backward pass; "" if it has none.
        start: nanoseconds since the start of the trace.
        end: nanoseconds since the start of the trace.
        communicates: whether it belongs to a collective.
    """

    device: int
    line: str
    name: str
    scope: str
    start: float
    end: float
    communicates: bool


def trace_files(folder: Path) -> list[Path]:
    """The traces in a folder and below, oldest first.

    Raises:
        ConfigurationError: there is none.
    """
    found = sorted(folder.glob("**/*.xplane.pb"), key=lambda path: (path.parent.name, path.name))
    if not found:
        raise ConfigurationError(
            f"{folder}: there is no trace (*.xplane.pb). zerojax train --profile writes one"
        )
    return found


def read_events(path: Path) -> list[Event]:
    """The device events of an ``.xplane.pb``, ordered by start.

    Raises:
        ConfigurationError: it is not a trace.
    """
    try:
        raw = path.read_bytes()
        names = instructions(raw)
        profile: Any = ProfileData.from_serialized_xspace(raw)
    except (OSError, ValueError, DecodeError, RuntimeError) as error:
        raise ConfigurationError(f"{path} cannot be read as a trace: {error}") from error
    return events_of(profile, names)


def events_of(profile: Any, names: dict[str, dict[str, tuple[str, str]]]) -> list[Event]:
    """The events of a ``ProfileData``, or of anything with planes, lines and events like it.

    On GPUs each device has a plane "/device:GPU:n" with a line per stream; CPU devices share the host's
    plane, and each event names its device. In both, the event of an instruction has the stats "hlo_op",
    "hlo_module" and "program_id".
    """
    with warnings.catch_warnings():
        # At its first use JAX's reader raises a DeprecationWarning from C++, which aborts the process where
        # warnings are errors.
        warnings.simplefilter("ignore", DeprecationWarning)
        return sorted(_events(profile, names), key=lambda event: (event.start, event.end))


def _events(profile: Any, names: dict[str, dict[str, tuple[str, str]]]) -> Iterator[Event]:
    for plane in profile.planes:
        on_device = re.fullmatch(r"/device:[A-Z]+:(\d+)", plane.name)
        if on_device is None and plane.name != "/host:CPU":
            continue
        for line in plane.lines:
            # Other lines of a device (steps, modules, name scopes) summarise the streams.
            if on_device is not None and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                kernel = event.name.lower().startswith("nccl")
                if "hlo_op" not in stats and not kernel:
                    continue
                device = int(on_device[1]) if on_device else stats.get("device_ordinal", 0)
                program = names.get(f"{stats.get('hlo_module')}({stats.get('program_id')})", {})
                opcode, op_name = program.get(stats.get("hlo_op", ""), ("", ""))
                if opcode in ("while", "call", "conditional"):  # their bodies have events of their own
                    continue
                communicates = kernel or bool(_COLLECTIVE.match(opcode or event.name))
                start = float(event.start_ns)
                yield Event(
                    device,
                    line.name,
                    event.name,
                    scope_of(op_name),
                    start,
                    start + float(event.duration_ns),
                    communicates,
                )


def scope_of(op_name: str) -> str:
    """The innermost of ``SCOPES`` in an instruction's name, with " backward" in the backward pass."""
    words = re.findall(r"\w+", op_name)
    scope = next((word for word in reversed(words) if word in SCOPES), "")
    if not scope:
        return ""
    return f"{scope} backward" if "transpose" in words else scope


def instructions(trace: bytes) -> dict[str, Instructions]:
    """Program -> instruction name -> (opcode, op_name), from the bytes of an ``.xplane.pb``.

    The metadata of a trace's host plane holds each program that ran as an ``HloProto`` of XLA. Its
    instructions have the name scopes of their source ("op_name"). No light Python package defines these
    messages. So they are parsed as messages of unknown fields, and the few fields needed are looked up by
    their numbers in tsl/profiler/protobuf/xplane.proto and xla/service/hlo.proto.

    A program's key is "module(program_id)", as in the trace: a process may hold several programs of one
    module name, and a trace also has programs that did not run.

    Raises:
        DecodeError: the bytes are not a trace.
    """
    found: dict[str, Instructions] = {}
    for plane in _all(trace, _PLANES):
        if b"/host:metadata" not in _all(plane, _PLANE_NAME):
            continue
        for entry in _all(plane, _EVENT_METADATA):
            for metadata in _all(entry, _MAP_VALUE):
                names = found.setdefault(_text(_all(metadata, _METADATA_NAME)), {})
                for stat in _all(metadata, _METADATA_STATS):
                    for proto in _all(stat, _STAT_BYTES):
                        names |= dict(_named(proto))
    return found


def _named(proto: bytes) -> Iterator[tuple[str, tuple[str, str]]]:
    for module in _all(proto, _MODULE):
        for computation in _all(module, _COMPUTATIONS):
            for instruction in _all(computation, _INSTRUCTIONS):
                op_name = [text for meta in _all(instruction, _METADATA) for text in _all(meta, _OP_NAME)]
                yield _text(_all(instruction, _NAME)), (_text(_all(instruction, _OPCODE)), _text(op_name))


def _text(values: list[bytes]) -> str:
    return values[0].decode(errors="replace") if values else ""


def _all(message: bytes, wanted: int) -> list[bytes]:
    """The values of a length-delimited field, in order.

    Raises:
        DecodeError: the bytes are not a message.
    """
    fields = UnknownFieldSet(Empty.FromString(message))
    return [field.data for field in fields if (field.field_number, field.wire_type) == (wanted, _BYTES)]
