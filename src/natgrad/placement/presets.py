"""Clusters by name. Speeds are what programs sustain, as shares of the makers' peaks.

Shares are rules of thumb, the same for all machines: 0.55 of the peak in convolutions and products
of matrices in float32 and 0.4 where tensor cores compute them, 0.8 of a link, and of these products
0.1 in eigendecompositions, whose reduction to a tridiagonal matrix waits for memory, and 0.5 in
Cholesky inverses, nearly all of which are products of blocks. A ratio of two
predictions is worth more than one of them. The papers' machines have rings, as NCCL had in their
years.
"""

from types import MappingProxyType

from natgrad.placement.cluster import Cluster, Link

_GIB = 1 << 30
_FLOAT32, _TENSOR_CORES, _LINK, _DECOMPOSING, _INVERTING = 0.55, 0.4, 0.8, 0.1, 0.5
_EDR = 12.5e9  # bytes a second: 100 Gbit/s


def _v100(name: str, nodes: int, links: int) -> Cluster:
    """V100: 15.7e12 operations a second in float32, NVLink 150e9 bytes a second in each
    direction."""
    return Cluster(
        name=name,
        flops=_FLOAT32 * 15.7e12,
        bandwidth=_LINK * links * _EDR,
        latency=5e-6,
        node=4,
        inside=Link(3e-6, _LINK * 150e9),
        decomposing=_DECOMPOSING,
        inverting=_INVERTING,
        capacity=16 * _GIB,
        nodes=nodes,
        rings=True,
    )


_CLUSTERS = (
    # The machine of Osawa 2019, sec. 5.1: 1,088 nodes of four V100, two EDR links a node.
    _v100("v100-1088x4", nodes=1088, links=2),
    # That of Pauloski 2022, sec. 6.1: 112 nodes of four V100, one EDR link a node.
    _v100("v100-112x4", nodes=112, links=1),
    # That of Pauloski 2021 (KAISA): 24 nodes of eight A100 with 40 GB and eight HDR links of 200
    # Gbit/s. 156e12 operations a second in TF32, NVLink 300e9 bytes a second in each direction.
    Cluster(
        name="a100-24x8",
        flops=_TENSOR_CORES * 156e12,
        bandwidth=_LINK * 8 * 25e9,
        latency=5e-6,
        node=8,
        inside=Link(3e-6, _LINK * 300e9),
        decomposing=_DECOMPOSING * 19.5 * _FLOAT32 / (156 * _TENSOR_CORES),  # without tensor cores
        inverting=_INVERTING * 19.5 * _FLOAT32 / (156 * _TENSOR_CORES),
        capacity=40e9,
        nodes=24,
        rings=True,
    ),
    # Nodes of eight H100 with 80 GB and a link of 400 Gbit/s for each. 989e12 operations a second
    # in bfloat16, 67e12 in float32, NVLink 450e9 bytes a second in each direction.
    Cluster(
        name="h100x8",
        flops=_TENSOR_CORES * 989e12,
        bandwidth=_LINK * 8 * 50e9,
        latency=5e-6,
        node=8,
        inside=Link(3e-6, _LINK * 450e9),
        decomposing=_DECOMPOSING * 67 * _FLOAT32 / (989 * _TENSOR_CORES),
        inverting=_INVERTING * 67 * _FLOAT32 / (989 * _TENSOR_CORES),
        capacity=80e9,
    ),
    Cluster(name="default"),
)
CLUSTERS = MappingProxyType({cluster.name: cluster for cluster in _CLUSTERS})
