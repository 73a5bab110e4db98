"""Shell patterns that select parameters by path: the last matching pattern decides, and "!" excludes."""

import fnmatch
from collections.abc import Iterable, Sequence

from zerojax.errors import ConfigurationError


def as_patterns(setting: str, given: Iterable[str]) -> tuple[str, ...]:
    """The patterns of a setting as a tuple.

    Refuse a single string, whose characters would be the patterns.
    """
    if isinstance(given, str):
        raise ConfigurationError(
            f"{setting}={given!r} is one string: give a tuple of patterns, ({given!r},)."
        )
    return tuple(given)


def matches(pattern: str, path: str) -> bool:
    """Whether a shell pattern, without its leading "!", matches a path. Case does not matter."""
    return fnmatch.fnmatchcase(path.lower(), pattern.lower().removeprefix("!"))


def why_not(patterns: Sequence[str], path: str, setting: str) -> str | None:
    """Why the patterns of a setting do not select a path, joined by "/"; None if they do."""
    deciding = next((pattern for pattern in reversed(patterns) if matches(pattern, path)), None)
    if deciding is None:
        return f"no pattern of {setting} matches"
    return f"excluded by {deciding!r}" if deciding.startswith("!") else None


def refuse_idle(
    setting: str, patterns: Sequence[str], paths: Sequence[str], default: Sequence[str] = ()
) -> None:
    """Refuse shell patterns that match none of a model's paths. Patterns in ``default`` need not match."""
    idle = [p for p in patterns if p not in default and not any(matches(p, path) for path in paths)]
    if idle:
        raise ConfigurationError(
            f"{setting}: {', '.join(map(repr, idle))} matches no parameter. Correct or remove it; paths are "
            f"{', '.join(map(repr, paths[:4]))} and so on."
        )
