"""The package's logger, ``logging.getLogger("zerojax")``: prints ``zerojax: MESSAGE`` to standard error.

To redirect its messages, add handlers of your own to it before zerojax is imported, or replace the one here.
"""

import logging
import sys


class _StandardError(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Looks up sys.stderr each time, as a test or a notebook may have replaced it.
        print(f"zerojax: {record.getMessage()}", file=sys.stderr, flush=True)


logger = logging.getLogger("zerojax")
logger.propagate = False
if not logger.handlers:
    logger.addHandler(_StandardError())
