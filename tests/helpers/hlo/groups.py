"""The replica groups of a collective, in every form that XLA writes.

replica_groups={{0,1},{2,3}}                        a list
replica_groups=[4,2]<=[2,4]T(1,0)                   an iota: reshaped, transposed, reshaped
replica_groups=mesh['node'=2,'local'=4] {'node'}    axes of a mesh; or a part of an axis, as in
                                                    'local':(1)2; the mesh may be permuted, as in
                                                    mesh[...], device_ids=(...)
"""

import re
from itertools import pairwise

import numpy as np

from hlo.text import HloError

Groups = tuple[tuple[int, ...], ...]

_LIST = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*)\))? ?\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def parse_groups(attributes: str, devices: int) -> Groups:
    """The replica groups of an instruction.

    Args:
        attributes: the text after the operands.
        devices: number of devices of the program; an empty list is one group of all.

    Returns:
        Groups of positions in ``mesh.devices.flat``, each in ring order.

    Raises:
        HloError: there are none, or in an unknown form.
    """
    if found := _LIST.search(attributes):
        return _braces(found[1]) or (tuple(range(devices)),)
    if found := _IOTA.search(attributes):
        shape, dims = _ints(found[1]), _ints(found[2])
        order = _ints(found[3]) if found[3] else range(len(dims))
        return _rows(np.arange(np.prod(dims)).reshape(dims).transpose(order).reshape(shape))
    if found := _MESH.search(attributes):
        return _mesh_groups(found[1], found[2], found[3])
    raise HloError(f"no readable replica groups in {attributes[:200]!r}")


def parse_pairs(attributes: str) -> Groups:
    """The (source, target) pairs of a collective-permute.

    Raises:
        HloError: there are none.
    """
    if found := _PAIRS.search(attributes):
        return _braces(found[1])
    raise HloError(f"no source_target_pairs in {attributes[:200]!r}")


def _mesh_groups(axes: str, device_ids: str | None, grouped: str) -> Groups:
    names: list[str] = []
    sizes: list[int] = []
    for axis in axes.split(","):
        name, size = axis.rsplit("=", 1)
        names.append(name.strip(" '\""))
        sizes.append(int(size))
    ids = _ints(re.sub(r"[^\d,]", "", device_ids)) if device_ids else range(np.prod(sizes))
    array = np.asarray(ids).reshape(sizes)
    # Split each mesh axis into (before, part, after) if a group takes only a part of it.
    wanted = [_axis_ref(ref, names, sizes) for ref in grouped.split(",") if ref.strip()]
    cuts = [sorted({1, size} | {c for w in wanted if w[0] == i for c in w[1:]})
            for i, size in enumerate(sizes)]  # fmt: skip
    shape: list[int] = []
    place: dict[tuple[int, int], int] = {}  # (mesh axis, devices before the part) -> new axis
    for i, cut in enumerate(cuts):
        for low, high in pairwise(cut):
            place[i, low] = len(shape)
            shape.append(high // low)
    inner = [place[i, low] for i, start, stop in wanted
             for low in cuts[i] if start <= low < stop]  # fmt: skip
    outer = [a for a in range(len(shape)) if a not in inner]
    members = int(np.prod([shape[a] for a in inner]))
    return _rows(array.reshape(shape).transpose(outer + inner).reshape(-1, members))


def _axis_ref(ref: str, names: list[str], sizes: list[int]) -> tuple[int, int, int]:
    """``'local'`` or ``'local':(pre)size`` as (mesh axis, pre, pre * size)."""
    found = re.fullmatch(r"\s*['\"]?([^'\":]+)['\"]?(?::\((\d+)\)(\d+))?\s*", ref)
    if found is None or found[1] not in names:
        raise HloError(f"no mesh axis {ref!r} among {names}")
    i = names.index(found[1])
    if found[2] is None:
        return i, 1, sizes[i]
    return i, int(found[2]), int(found[2]) * int(found[3])


def _braces(text: str) -> Groups:
    return tuple(tuple(_ints(g)) for g in re.findall(r"\{([\d,]*)\}", text))


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _rows(array: np.ndarray) -> Groups:
    return tuple(map(tuple, array.tolist()))
