"""Paths to a model's leaves, their names, and trees of values by path."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from flax import traverse_util
from jaxtyping import PyTree

from zerojax.errors import ConfigurationError

Path = tuple[str, ...]


def by_name(paths: Collection[Path]) -> dict[str, Path]:
    """The paths of a model's parameters by name: their parts joined by "/".

    Patterns select parameters by name, and checkpoints use names as folders. A part may contain "/" itself,
    as in ``flax.linen.SpectralNorm``.

    Raises:
        ConfigurationError: two parameters or modules have the same name, or one has the name of another's
            folder.
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
        f'{one} and {other} in the model have the same name when their parts are joined by "/", or one is '
        'a folder of the other: rename the variable or module that has a "/" in its name. The scale of '
        "flax.linen.WeightNorm has one: call it and its layer in a module's @nn.compact method, or assign "
        "the layer to another attribute in setup."
    )


def to_tree[T](values: Mapping[Path, T]) -> dict[str, PyTree[T]]:
    """Nest values by path: into the dict that an optimizer sees, or a Linen module's collection."""
    return traverse_util.unflatten_dict(dict(values))


def from_tree(tree: Mapping[str, PyTree]) -> dict[Path, PyTree]:
    """Undo ``to_tree``."""
    return dict(traverse_util.flatten_dict(tree))


def by_path(tree: PyTree, is_leaf: Callable[[object], bool] | None = None) -> dict[Path, Any]:
    """The leaves of any pytree by path; an index in a list is a part of a path, too."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {tuple(jax.tree_util.keystr((key,), simple=True) for key in path): x for path, x in found}
