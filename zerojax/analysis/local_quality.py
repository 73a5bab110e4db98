"""What local updates cost in quality, as far as it was measured: recommendations quote it."""

LOSS_ABOVE_ZERO3: dict[str, dict[int, float]] = {
    "adamw": {16: 6.0, 64: 7.5, 128: 9.3},
    "muon": {16: 6.7, 64: 8.4, 128: 11.3},
}
"""Validation loss above that of zero3 with the same optimizer, in percent, by optimizer and ``every``.

Two nodes trained weights of 124M parameters on for 400 steps, each way at the best of a few learning rates.
Four nodes with Muon and ``every=64`` ended 17.7% above. docs/quality.md has these runs, and others from
random weights, which end 1.5% (21 tokens a parameter) to 33% above."""
LEAST_EVERY = 16
"""The smallest ``every`` to recommend, since none below was measured: the shorter a round, the more of it a
fragment is on its way, and what nodes learn of it meanwhile is lost (``ZeroConfig.outer_delay``)."""


def expected_loss(every: int, *optimizers: str) -> str:
    """The loss of quality to expect from local updates, in words.

    The figure is that of the next larger ``every`` that was measured; without names of optimizers, of all
    that the table has.
    """
    each = "; ".join(f"{name} {_figure(name, every)}" for name in optimizers or LOSS_ABOVE_ZERO3)
    return (
        f"validation loss above zero3's in 400 steps of 124M parameters on two nodes, {each} (four nodes "
        "lost twice as much with muon; runs of many tokens a parameter lose less: docs/quality.md)"
    )


def _figure(optimizer: str, every: int) -> str:
    measured = LOSS_ABOVE_ZERO3.get(optimizer, {})
    longer = [known for known in measured if known >= every]
    return f"{measured[min(longer)]:.2g}% with zero.every = {min(longer)}" if longer else "not measured"
