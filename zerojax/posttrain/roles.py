"""What a method adds to the roles of a run."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from zerojax.run.build import Trained


class Roles(NamedTuple):
    """What a method adds to a run.

    Attributes:
        fields: of the trainer.
        trained: the states that each step trains beside the policy.
        notes: lines about them for the user.
    """

    fields: Mapping[str, Any] = MappingProxyType({})
    trained: Sequence[Trained] = ()
    notes: Sequence[str] = ()
