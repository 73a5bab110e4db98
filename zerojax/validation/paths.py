"""Checks of the paths of checkpoints."""

import glob
from pathlib import Path

from zerojax.errors import ConfigurationError
from zerojax.validation.untrusted import is_unicode, printable


def check_checkpoint_path(folder: Path) -> None:
    """Refuse a folder of checkpoints if its absolute path is a shell pattern, or is not valid Unicode.

    Orbax finds the files that it has just written by a pattern. In such a folder it would silently skip all
    arrays.
    """
    path = str(folder.absolute())
    if glob.escape(path) != path or "\\" in path or not is_unicode(path):
        raise ConfigurationError(
            f"{printable(path)}: checkpoints cannot be written in a folder whose path has one of [ * ? \\, "
            "or is not valid Unicode. Choose another folder, or rename it"
        )
