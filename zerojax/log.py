"""The package's logger, ``logging.getLogger("zerojax")``: prints ``zerojax: MESSAGE`` to standard error.

To redirect its messages, add your own handlers to it before zerojax is imported, or replace the one here.
"""

import logging

from zerojax import terminal


class _StandardError(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        terminal.stderr.write(f"zerojax: {record.getMessage()}\n")


logger = logging.getLogger("zerojax")
logger.propagate = False
if not logger.handlers:
    logger.addHandler(_StandardError())


def warn(text: str) -> None:
    """Log a warning on the first process of a job, for all of them."""
    import jax  # the launcher logs without it

    if jax.process_index() == 0:
        logger.warning(text)
