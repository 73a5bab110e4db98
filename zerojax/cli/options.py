"""Parsing of a command's options."""

import dataclasses
import functools
import io
import operator
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, cast

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

from zerojax.cli.booleans import spell_booleans
from zerojax.errors import ConfigurationError
from zerojax.run.config import MeshSection
from zerojax.run.config.keys import documentation, keys_of, row_of, section_of
from zerojax.run.data.formats import user_path
from zerojax.validation.bounds import all_at_once, check_scalars

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from zerojax.run.config.keys import Section

RunPath = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
"""The folder of a run, as the first word of a command line."""

_REGISTRY = ConstructorRegistry()
_BOOLEANS = {"true": True, "false": False}
_UNSET = "unset"
"""How help shows None. On a command line, None unsets a value that a file has set."""


def _read_path(word: str) -> Path:
    if not word:
        raise ValueError("a path is empty: name a file or folder, or . for the current folder")
    return user_path(word)  # shells leave the "~" of --run-dir=~/runs as it is


def _read_boolean(word: str) -> bool:
    if word.lower() not in _BOOLEANS:
        raise ValueError(f"{word!r} is neither true nor false: give one of them")
    return _BOOLEANS[word.lower()]


def _one_word[T](kind: type[T], metavar: str, read: Callable[[str], T], show: Callable[[T], str]) -> None:
    """Have tyro read a type from one word."""

    @_REGISTRY.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[T] | None:
        if info.type is not kind:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar,
            instance_from_str=lambda words: read(words[0]),
            is_instance=lambda value: isinstance(value, kind),
            str_from_instance=lambda value: [show(value)],
        )


# A boolean, which may be missing, is spelled as in TOML. tyro itself accepts only "True" and "False".
_one_word(bool, "{true,false}", _read_boolean, lambda value: str(value).lower())
# A shell makes an empty path of an unset variable, which tyro would take for the current folder.
_one_word(Path, "PATH", _read_path, str)


@_REGISTRY.primitive_rule
def _may_be_unset(
    info: PrimitiveTypeInfo,
) -> PrimitiveConstructorSpec[Any] | UnsupportedTypeAnnotationError | None:
    """Parse an option of type ``T | None`` as ``T``; None is the value if it is left out.

    The word "None" unsets an option without choices. tyro itself would add that word to the choices, in no
    order, and to the help.
    """
    kinds = typing.get_args(info.type)
    if info.type_origin not in (typing.Union, types.UnionType) or types.NoneType not in kinds:
        return None
    kind: Any = functools.reduce(operator.or_, (one for one in kinds if one is not types.NoneType))
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, info.markers))
    if isinstance(spec, UnsupportedTypeAnnotationError):
        return spec

    return dataclasses.replace(
        spec,
        instance_from_str=lambda words: None if words == ["None"] else spec.instance_from_str(words),
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: [_UNSET] if value is None else spec.str_from_instance(value),
    )


def option_table(section: "Section", shown: Mapping[str, Any] = MappingProxyType({})) -> type:
    """The type, for tyro, of a section's options: a dict of the options that a command line gives.

    The section may be ``RunConfig``. Lists of tables can be set only in a file. --help shows the values in
    ``shown`` as defaults.
    """
    options: dict[str, Any] = {}
    for key in keys_of(section):
        default = shown.get(key.name)
        if (inner := section_of(key.kind)) is not None:
            options[key.name] = option_table(inner, default or {})
        elif row_of(key.kind) is None:
            kind = key.kind | None if key.optional else key.kind
            hint = f"(default: {_in_words(default)})" if shown else ""
            options[key.name] = Annotated[kind, tyro.conf.arg(help=key.meaning, help_behavior_hint=hint)]
    make = cast(Callable[..., type], TypedDict)  # type checkers know no keys that are computed
    made = make(section.__name__, options, total=False)
    made.__doc__, _ = documentation(section)
    return made


MeshOptions = Annotated[Mapping[str, Any], tyro.conf.arg(constructor=option_table(MeshSection))]
"""The given options of --mesh; the others come from a run."""


def read_options[Options: "DataclassInstance"](
    options: type[Options], command: str, arguments: Sequence[str], *, helps: bool = True
) -> Options:
    """Read a command line.

    ``options`` is a dataclass; its docstring is the text of --help. Without ``helps``, it has its own option
    of that name.

    Raises:
        ConfigurationError: an invalid value of a setting.
        SystemExit: wrong options (code 2), or after --help (code 0).
    """
    program, errors = f"zerojax {command}", io.StringIO()
    try:
        with redirect_stderr(errors), all_at_once():
            words = [*spell_booleans(options, arguments)]
            read = tyro.cli(options, args=words, prog=program, registry=_REGISTRY, add_help=helps)
    except SystemExit as end:
        if (refusal := _cause(end)) is not None:
            raise refusal from None
        sys.stderr.write(errors.getvalue())
        raise
    check_scalars(read, lambda field: f"--{field.replace('_', '-')}")
    return read


def _in_words(value: Any) -> str:
    """A value in the form of a command line."""
    if isinstance(value, list):
        return " ".join(map(_in_words, value))
    if value is None:
        return _UNSET
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cause(end: BaseException) -> ConfigurationError | None:
    """The error of one of our sections that made tyro exit: tyro would print it in a box."""
    cause: BaseException | None = end
    while cause is not None and not isinstance(cause, ConfigurationError):
        cause = cause.__context__
    return cause
