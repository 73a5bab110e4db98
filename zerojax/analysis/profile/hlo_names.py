"""The name scopes of a traced program's instructions, read from the trace itself.

The metadata of a trace's host plane holds each program that ran as an ``HloProto`` of XLA. Its instructions
have the name scopes of their source ("op_name"). No light Python package defines these messages. So they are
parsed as messages of unknown fields, and the few fields needed are looked up by their numbers in
tsl/profiler/protobuf/xplane.proto and xla/service/hlo.proto.
"""

from collections.abc import Iterator

from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

_BYTES = 2  # the wire type of strings, bytes and messages

# Field numbers from XSpace to an XStat's bytes_value.
_PLANES, _PLANE_NAME, _EVENT_METADATA, _MAP_VALUE, _METADATA_NAME = 1, 2, 4, 2, 2
_METADATA_STATS, _STAT_BYTES = 5, 6
# From HloProto to an instruction, and in it.
_MODULE, _COMPUTATIONS, _INSTRUCTIONS = 1, 3, 2
_NAME, _OPCODE, _METADATA, _OP_NAME = 1, 2, 7, 2

Instructions = dict[str, tuple[str, str]]


def instructions(trace: bytes) -> dict[str, Instructions]:
    """Program -> instruction name -> (opcode, op_name), from the bytes of an ``.xplane.pb``.

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
