"""What the kernel's files say of the network."""

from pathlib import Path

import pytest

from zerojax.errors import ConfigurationError
from zerojax.network import discovery
from zerojax.network.discovery import chosen_interfaces, discover_network, interface_rate, rdma_of


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "gigabits"),
    [
        ({"speed": "100000\n", "device__vendor": "0x15b3\n"}, 100),
        ({"speed": "50000\n", "bonding__mode": "802.3ad 4\n"}, 50),
        ({"speed": "25000\n", "uevent": "DEVTYPE=vlan\n"}, 25),
        ({"speed": "10000\n", "uevent": "INTERFACE=eth0\n"}, None),  # a container's veth pair
        ({"speed": "-1\n", "device__vendor": "0x1af4\n"}, None),
        ({"device__vendor": "0x1af4\n"}, None),
    ],
)
def test_the_rate_of_an_interface(tmp_path, files, gigabits):
    assert interface_rate(write(tmp_path, **files)) == (gigabits and gigabits * 1e9 / 8)


PORT = {"state": "4: ACTIVE\n", "link_layer": "InfiniBand\n"}


@pytest.mark.parametrize(
    ("environ", "port", "uverbs", "found"),
    [
        ({}, PORT, True, "InfiniBand (mlx5_0)"),
        ({}, PORT | {"link_layer": "Ethernet\n"}, True, "RoCE (mlx5_0)"),
        ({}, PORT | {"state": "1: DOWN\n"}, True, ""),
        ({}, PORT, False, ""),  # a container that sees the host's /sys, and none of its devices
        ({"NCCL_IB_DISABLE": "1"}, PORT, True, ""),
        ({"NCCL_IB_DISABLE": "0"}, PORT, True, "InfiniBand (mlx5_0)"),
        ({"NCCL_NET": "Socket"}, PORT, True, ""),
        ({"NCCL_NET": "gIB"}, PORT, False, "NCCL_NET=gIB"),
    ],
)
def test_what_carries_rdma(tmp_path, environ, port, uverbs, found):
    devices, verbs = tmp_path / "infiniband", tmp_path / "dev"
    write(devices / "mlx5_0" / "ports" / "1", **port)
    if uverbs:
        write(verbs, uverbs0="")
    assert rdma_of(environ, devices, verbs) == found


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth", []),
        ("=eth1", ["eth1"]),
        ("^docker,lo", ["eth0", "eth1"]),
        ("^=eth0", ["eth1", "lo", "docker0"]),
        ("eth1,lo", ["eth1", "lo"]),
    ],
)
def test_interfaces_that_nccl_is_told_to_use(wanted, names):
    assert chosen_interfaces(["eth0", "eth1", "lo", "docker0"], wanted) == names


def test_the_interface_leads_to_the_coordinator(monkeypatch):
    monkeypatch.setattr(discovery, "_joined", [])
    assert discover_network({}) == discovery.Network(rdma=discover_network({}).rdma)
    discovery.remember_coordinator("127.0.0.1")
    found = discover_network({})
    assert (found.interface, found.loopback, found.rate) == ("lo", True, None)
    assert found.mtu == int(Path("/sys/class/net/lo/mtu").read_text())
    assert discover_network({discovery.VARIABLE: "100gbit"}).rate == 100e9 / 8


def test_a_wrong_rate_is_refused():
    with pytest.raises(ConfigurationError, match="ZEROJAX_LINK_RATE: 'fast' is not a rate"):
        discover_network({discovery.VARIABLE: "fast"})
