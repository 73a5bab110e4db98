"""ZeRO and ZeRO++ for JAX: sharded training of Flax models over slow networks.

``__init__.pyi`` lists everything public. A name or module is imported when it is first used, because most
of them import JAX, Flax or Orbax. The packages that define them are private.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any


def _public() -> dict[str, tuple[str, str]]:
    """The package or module that each public name is imported from, and its name there."""
    imports = ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    return {
        alias.asname or alias.name: (statement.module or __name__, alias.name)
        for statement in imports
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


_PUBLIC = _public()
__all__ = [*_PUBLIC]  # pyrefly: ignore[unresolvable-dunder-all]


def __getattr__(name: str) -> Any:
    """Import a public name or module, when it is first asked for."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    source, original = _PUBLIC[name]
    names = vars(import_module(source))
    if original not in names:  # a module that is not imported yet
        import_module(f"{source}.{original}")
    return globals().setdefault(name, names[original])


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
