"""The measured loss of quality by local updates, which recommendations quote."""

LOSS_ABOVE_ZERO3: dict[str, dict[int, float]] = {
    "adamw": {16: 6.0, 64: 7.5, 128: 9.3},
    "muon": {16: 6.7, 64: 8.4, 128: 11.3},
}
"""Percent by which the validation loss exceeds zero3's with the same optimizer, by optimizer and ``every``.

Two nodes continued to train weights of 124M parameters for 400 steps, each way at the best of a few learning
rates. Four nodes with Muon and ``every=64`` ended 17.7% above. docs/quality.md has these runs. It also has
runs from random weights, which end 1.5% (21 tokens a parameter) to 33% above."""
LEAST_EVERY = 16
"""The smallest ``every`` to recommend, because no smaller one was measured.

In a shorter round a fragment travels for a larger part of the round, and the nodes' changes of it meanwhile
are lost (``ZeroConfig.outer_delay``)."""


def expected_loss(every: int, *optimizers: str) -> str:
    """A sentence about the loss of quality to expect from local updates.

    Args:
        every: as ``ZeroConfig.every``. The figure is of the next larger one that was measured.
        optimizers: names; none stands for all that were measured.
    """
    each = ", ".join(_figure(name, every) for name in optimizers or LOSS_ABOVE_ZERO3)
    return (
        f"the validation loss was above zero3's, {each}, in 400 steps of 124M parameters on two nodes (on "
        "four nodes muon lost twice as much; runs of many tokens per parameter lose less: docs/quality.md)"
    )


def _figure(optimizer: str, every: int) -> str:
    measured = LOSS_ABOVE_ZERO3.get(optimizer, {})
    longer = [known for known in measured if known >= every]
    if not longer:
        return f"by an unmeasured amount with {optimizer}"
    return f"by {measured[min(longer)]:.2g}% with {optimizer} and zero.every = {min(longer)}"
