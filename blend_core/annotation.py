"""What the leaves and nodes of a prefix tree cost: compute, memory and density (BlendServe §5.1)."""

from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from blend_core.output_length import OutputLengths
from blend_core.performance import compute_density, compute_s, memory_s
from blend_core.prefix_tree import PrefixTree
from blend_core.specs import DeviceProfile, ModelSpec

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TreeCosts:
    """What the parts of a tree cost by themselves.

    Attributes:
        leaf_compute_s: `(num_requests,)` seconds of compute of each leaf's own segment and answer.
        leaf_memory_s: `(num_requests,)` seconds of KV reading of each leaf.
        segment_compute_s: `(num_nodes,)` seconds of compute of each node's own segment; the root has none.
    """

    leaf_compute_s: Floats
    leaf_memory_s: Floats
    segment_compute_s: Floats

    @classmethod
    def of(
        cls, tree: PrefixTree, lengths: OutputLengths, model: ModelSpec, device: DeviceProfile
    ) -> "TreeCosts":
        """Returns the costs under estimated lengths, which are by row of the requests."""
        mean, second_moment = lengths.mean[tree.leaf_row], lengths.second_moment[tree.leaf_row]
        segment = np.zeros(tree.num_nodes)
        segment[1:] = compute_s(model, device, tree.depth[1:], 0, tree.depth[tree.parent[1:]])
        return cls(
            leaf_compute_s=compute_s(
                model, device, tree.num_prompt_tokens, mean, tree.depth[tree.leaf_parent]
            ),
            leaf_memory_s=memory_s(model, device, tree.num_prompt_tokens, mean, second_moment),
            segment_compute_s=segment,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Annotation:
    """Costs of the items of a tree: items `0:num_requests` are its leaves, then come its nodes.

    All arrays are `(num_requests + num_nodes,)`. A leaf's compute is that of its own segment and its answer.

    Attributes:
        compute_s: seconds of compute of all leaves below, every shared segment below and the own one once.
        memory_s: seconds of KV reading of all leaves below.
        density: their ratio.
    """

    compute_s: Floats
    memory_s: Floats
    density: Floats


def annotate(tree: PrefixTree, costs: TreeCosts, stays: npt.NDArray[np.bool_] | None = None) -> Annotation:
    """Sums costs up the tree (BlendServe §5.1, §5.2).

    Args:
        tree: the tree.
        costs: of its parts.
        stays: `(num_requests,)` bool by leaf; leaves that do not stay cost nothing, and neither does a node
            without any that does. All stay by default.
    """
    leaf_compute, leaf_memory, segment = costs.leaf_compute_s, costs.leaf_memory_s, costs.segment_compute_s
    if stays is not None:
        leaf_compute, leaf_memory = leaf_compute * stays, leaf_memory * stays
        num_staying = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(stays, dtype=np.int64)))
        segment = segment * (num_staying[tree.leaf_end] > num_staying[tree.leaf_start])
    nothing = np.zeros(tree.num_nodes)
    compute = np.concatenate((leaf_compute, sums_below(tree.parent, tree.leaf_parent, leaf_compute, segment)))
    memory = np.concatenate((leaf_memory, sums_below(tree.parent, tree.leaf_parent, leaf_memory, nothing)))
    return Annotation(compute, memory, compute_density(compute, memory))


def amortised_leaf_compute_s(tree: PrefixTree, costs: TreeCosts, top: int) -> Floats:
    """Returns `(num_requests,)` seconds of compute of each leaf, with its part of the segments above it.

    A segment is charged in equal parts to the leaves below it; the own segment alone would make a leaf look
    less dense than it is for whoever computes its prefix. The segment of node `top`, which all leaves share,
    is left out.
    """
    segment = costs.segment_compute_s.copy()
    segment[top] = 0.0
    part = sums_above(tree.parent, segment / np.maximum(tree.leaf_end - tree.leaf_start, 1))
    return np.asarray(costs.leaf_compute_s + part[tree.leaf_parent], dtype=np.float64)


@numba.njit(cache=True, nogil=True)
def sums_below(parent: Ints, leaf_parent: Ints, leaf_values: Floats, node_values: Floats) -> Floats:
    """Returns `(num_nodes,)` the value of each node plus those of all leaves and nodes below it."""
    total = node_values.copy()
    for leaf in range(len(leaf_parent)):
        total[leaf_parent[leaf]] += leaf_values[leaf]
    # Preorder backwards: a node is complete before it is added to its parent.
    for node in range(len(parent) - 1, 0, -1):
        total[parent[node]] += total[node]
    return total


@numba.njit(cache=True, nogil=True)
def sums_above(parent: Ints, node_values: Floats) -> Floats:
    """Returns `(num_nodes,)` the value of each node plus those of all nodes above it."""
    total = node_values.copy()
    for node in range(1, len(parent)):
        total[node] += total[parent[node]]
    return total
