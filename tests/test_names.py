"""What type checkers leave out: private names, and comparisons with values that a setting never has."""

import ast
import dataclasses
import re
import typing
from collections.abc import Iterator

from environment import ROOT

from zerojax.models import GPTConfig
from zerojax.zero_config import ZeroConfig

FILES = [file for folder in ("zerojax", "pallas_kernels") for file in (ROOT / folder).rglob("*.py")]
TREES = {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in FILES}


def test_no_module_imports_private_names_of_another():
    imports = [
        (file, node.module, name.name)
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("zerojax", "pallas_kernels"))
        for name in node.names
    ]
    assert not [found for found in imports if found[-1].startswith("_")]


def test_private_functions_and_classes_are_used():
    private = [
        (file, node.name)
        for file, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and re.match("_[^_]", node.name)
        if not node.decorator_list  # which may register it
    ]
    assert not [
        found for found in private if len(re.findall(rf"\b{found[1]}\b", (ROOT / found[0]).read_text())) < 2
    ]


def words_of_settings() -> Iterator[tuple[str, set[str]]]:
    for config in (ZeroConfig, GPTConfig):
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            arms = (hints[field.name], *typing.get_args(hints[field.name]))
            words = [typing.get_args(arm) for arm in arms if typing.get_origin(arm) is typing.Literal]
            # Commands have an option of this name for other files.
            if words and field.name != "weights":
                yield field.name, set(*words)


def comparisons() -> Iterator[tuple[str, str, str]]:
    """Attributes that are compared with strings: the file, the attribute and the string."""
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute):
                constants = [x.value for x in ast.walk(node.comparators[0]) if isinstance(x, ast.Constant)]
                yield from ((file, node.left.attr, word) for word in constants if isinstance(word, str))


def test_settings_are_compared_with_values_that_they_may_have():
    settings = dict(words_of_settings())
    found = [compared for compared in comparisons() if compared[1] in settings]
    assert len(found) > 80
    assert not [(file, name, word) for file, name, word in found if word not in settings[name]]
