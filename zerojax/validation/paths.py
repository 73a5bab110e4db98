"""Checks of the paths of checkpoints."""

import glob
import re
from pathlib import Path

from zerojax.errors import ConfigurationError
from zerojax.validation.untrusted import is_unicode, printable


def is_store_url(text: str) -> bool:
    """Whether a text is the URL of a folder in an object store."""
    return re.fullmatch(r"((s3|gs)://[\w.-]+(/[^\s?#]*)?|file:///[^\s?#]+)", text) is not None


def check_checkpoint_path(folder: Path) -> None:
    """Refuse a folder of checkpoints if its path is an object store's, a shell pattern, or not valid Unicode.

    Orbax finds the files that it has just written by a pattern. In such a folder it would silently skip all
    arrays.
    """
    store, *_ = (*folder.parts, "")
    if store.endswith(":") and not folder.exists():
        raise ConfigurationError(
            f"{printable(store)}// names an object store: give a folder on a disk. A run copies itself to a "
            "store with --checkpoint.copy-to URL, and `zerojax checkpoints FOLDER --fetch URL` brings it back"
        )
    path = str(folder.absolute())
    if glob.escape(path) != path or "\\" in path or not is_unicode(path):
        raise ConfigurationError(
            f"{printable(path)}: checkpoints cannot be written in a folder whose path has one of [ * ? \\, "
            "or is not valid Unicode. Choose another folder, or rename it"
        )
