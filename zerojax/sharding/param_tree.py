"""Paths to a model's leaves, and trees of values by path."""

from collections.abc import Mapping
from typing import Any

from flax import traverse_util

Path = tuple[str, ...]


def to_tree(values: Mapping[Path, Any]) -> dict[str, Any]:
    """Nest values by path: into the dict that an optimizer sees, or a Linen module's collection."""
    return traverse_util.unflatten_dict(dict(values))


def from_tree(tree: Mapping[str, Any]) -> dict[Path, Any]:
    """Undo ``to_tree``."""
    return dict(traverse_util.flatten_dict(tree))
