"""Keeps Orbax from logging pages about an error that is then raised, and told, in one line."""

import logging


def filter_orbax_logs() -> None:
    """Drop what Orbax logs; other users of the `absl` logger are not affected."""
    logging.getLogger("absl").addFilter(_is_not_orbax)


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/checkpoint/" not in record.pathname
