"""Drops Orbax's log: it fills pages with errors that zerojax raises and reports in one line."""

import logging


def filter_orbax_logs() -> None:
    """Drop the records of Orbax; other users of the ``absl`` logger are not affected."""
    logging.getLogger("absl").addFilter(_is_not_orbax)


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/checkpoint/" not in record.pathname
