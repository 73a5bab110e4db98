"""Which paths checkpoints may have."""

import glob
from pathlib import Path

from zerojax.errors import ConfigurationError
from zerojax.validation.untrusted import is_unicode, printable


def check_checkpoint_path(folder: Path) -> None:
    """Refuse a folder of checkpoints whose absolute path reads as a shell pattern, or is not valid Unicode.

    Orbax looks for the files that it has just written by a pattern, and would silently leave out all arrays.

    Raises:
        ConfigurationError: naming the folder.
    """
    path = str(folder.absolute())
    if glob.escape(path) != path or "\\" in path or not is_unicode(path):
        raise ConfigurationError(
            f"{printable(path)}: no checkpoint can be written below a folder whose name has one of [ * ? \\, "
            "or is not valid Unicode: choose another, or rename it"
        )
