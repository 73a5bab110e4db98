"""Replica groups in all their forms, against groups written out by hand."""

import pytest
from hlo.groups import parse_groups, parse_pairs
from hlo.text import HloError

CASES = {
    "{{0,1},{2,3}}": ((0, 1), (2, 3)),
    "{}": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "[2,4]<=[8]": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "[4,2]<=[2,4]T(1,0)": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "[1,8]<=[8]": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "mesh['node'=2,'local'=4] {'node'}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['node'=2,'local'=4] {'local'}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['node'=2,'local'=4] {'local','node'}": ((0, 4, 1, 5, 2, 6, 3, 7),),
    "mesh[node=2,local=4] {local:(1)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "mesh['node'=2,'local'=4] {'local':(2)2}": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "mesh['node'=2,'local'=4] {'local':(2)2,'node'}": ((0, 4, 1, 5), (2, 6, 3, 7)),
    "mesh['node'=2,'local'=2], device_ids=({{0,2},{1,3}}) {'local'}": ((0, 2), (1, 3)),
}


@pytest.mark.parametrize(("text", "groups"), CASES.items())
def test_groups(text, groups):
    attributes = f", channel_id=1, replica_groups={text}, dimensions={{0}}, metadata={{}}"
    assert parse_groups(attributes, 8) == groups


def test_pairs():
    assert parse_pairs(", source_target_pairs={{0,4},{4,0}}, x=1") == ((0, 4), (4, 0))


@pytest.mark.parametrize("text", ["", ", replica_groups=mesh['a'=2] {'b'}", ", replica_groups=?"])
def test_refuses(text):
    with pytest.raises(HloError):
        parse_groups(text, 2)
    with pytest.raises(HloError):
        parse_pairs(text)
