"""The source of each row of a mixture, which depends only on the row's index and the weights."""

import math
from collections.abc import Sequence
from fractions import Fraction


class Shares:
    """Rows interleaved from sources in proportion to their weights.

    Among the first k rows, each source has its share of k, to within the number of sources. The order is
    deterministic, and equal to ``grain.MapDataset.mix``, which allows fewer weights.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Take the sources' weights, all positive; only their ratios matter."""
        exact = [Fraction(weight) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._shares = [int(weight * scale) for weight in exact]

    def taken(self, rows: int) -> list[int]:
        """The number of rows from each source among the first ``rows`` rows."""
        counts, left = [], sum(self._shares)
        for share in self._shares:
            others = rows * (left - share) // left
            counts.append(rows - others)
            rows, left = others, left - share
        return counts

    def place(self, row: int) -> tuple[int, int]:
        """The source of a row, and its index in that source."""
        before, after = self.taken(row), self.taken(row + 1)
        source = next(i for i, (b, a) in enumerate(zip(before, after, strict=True)) if a > b)
        return source, before[source]
