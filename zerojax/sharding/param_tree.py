"""Paths to a model's leaves, their names, and trees of values by path."""

from collections.abc import Collection, Mapping

from flax import traverse_util
from jaxtyping import PyTree

from zerojax.errors import ConfigurationError

Path = tuple[str, ...]


def by_name(paths: Collection[Path]) -> dict[str, Path]:
    """The paths of a model's leaves by name: their parts, joined by "/".

    Patterns choose by names, and checkpoints are folders of them. Parts may have a "/" in them, as those of
    ``flax.linen.SpectralNorm`` do.

    Raises:
        ConfigurationError: two of them, or the modules that hold them, have the same name; or one is named
            like a folder of another.
    """
    found: dict[str, Path] = {}
    named = {"/".join(path): path for path in paths}
    for path in paths:
        for depth in range(1, len(path) + 1):
            other = found.setdefault("/".join(path[:depth]), path[:depth])
            if other != path[:depth]:
                raise _ambiguous(path[:depth], other)
        parts = "/".join(path).split("/")
        for depth in range(1, len(parts)):
            if other := named.get("/".join(parts[:depth])):
                raise _ambiguous(path, other)
    return named


def _ambiguous(one: Path, other: Path) -> ConfigurationError:
    return ConfigurationError(
        f'the names of {one} and {other} in the model, which are these parts joined by "/", are the same or '
        'one is a folder of the other: rename a variable or module that has a "/" in its name.'
    )


def to_tree[T](values: Mapping[Path, T]) -> dict[str, PyTree[T]]:
    """Nest values by path: into the dict that an optimizer sees, or a Linen module's collection."""
    return traverse_util.unflatten_dict(dict(values))


def from_tree(tree: Mapping[str, PyTree]) -> dict[Path, PyTree]:
    """Undo ``to_tree``."""
    return dict(traverse_util.flatten_dict(tree))
