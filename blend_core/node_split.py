"""Which parts of the tree to cut off and put under the root (BlendServe §5.2, appendix A.1).

A part is out of order when the work before it is not the work that is denser than it. The children of one
node that are of like density leave together as a *run*: their common prefix is computed anew once, whatever
their number. Runs are bought where they bring the most work to its place per token to recompute.
"""

from dataclasses import dataclass
from typing import Final

import numba
import numpy as np
import numpy.typing as npt

from blend_core.annotation import Floats, Ints, TreeCosts, amortised_leaf_compute_s, sums_below
from blend_core.performance import compute_density
from blend_core.prefix_tree import PrefixTree

RUNS_PER_DOUBLING: Final = 2
"""Densities that differ by less than a factor of `2 ** (1 / RUNS_PER_DOUBLING)` count as alike."""

MIN_DISPLACEMENT: Final = 0.01
"""Share of the job's work by which a part must be off its place to be out of order."""


@dataclass(frozen=True, slots=True, eq=False)
class LeafWork:
    """What each leaf brings with it wherever it goes, and where it belongs; arrays are `(num_requests,)`.

    Attributes:
        compute_s: seconds of compute, its part of the shared segments included.
        memory_s: seconds of KV reading.
        denser_s: work of all leaves that are denser.
        as_dense_s: work of all leaves that are denser or as dense.
        falling: `-density`, of all leaves in rising order.
        done_s: `(num_requests + 1,)` work of the first so many leaves of that order.
    """

    compute_s: Floats
    memory_s: Floats
    denser_s: Floats
    as_dense_s: Floats
    falling: Floats
    done_s: Floats

    @classmethod
    def of(cls, tree: PrefixTree, costs: TreeCosts, top: int) -> "LeafWork":
        """Returns the work of each leaf; the segment of node `top`, which all share, is left out."""
        compute, memory = amortised_leaf_compute_s(tree, costs, top), costs.leaf_memory_s
        key = -compute_density(compute, memory)
        by_density = np.argsort(key, kind="stable")
        falling = key[by_density]
        done = np.concatenate((np.zeros(1), np.cumsum((compute + memory)[by_density])))
        # Equal keys lie together, so their bounds come from one pass and no search.
        firsts = np.flatnonzero(np.diff(falling, prepend=np.nan) != 0)
        num_alike = np.diff(np.append(firsts, len(falling)))
        denser, as_dense = np.empty(len(key)), np.empty(len(key))
        denser[by_density] = np.repeat(done[firsts], num_alike)
        as_dense[by_density] = np.repeat(done[firsts + num_alike], num_alike)
        return cls(compute, memory, denser, as_dense, falling, done)

    @property
    def total_s(self) -> Floats:
        """`(num_requests,)` work: compute and memory."""
        return self.compute_s + self.memory_s


def choose_runs(
    tree: PrefixTree,
    work: LeafWork,
    places: Ints,
    order: Ints,
    stays: npt.NDArray[np.bool_],
    top: int,
    budget_tokens: float,
) -> tuple[Ints, float]:
    """Chooses the runs to cut off. Does not mutate.

    Args:
        tree: the tree.
        work: of each leaf.
        places: `(num_requests + num_nodes,)` place of each item's first leaf in the layer-wise order.
        order: `(num_requests,)` leaves in the order in force.
        stays: `(num_requests,)` leaves that have not been moved yet.
        top: the node under which all leaves lie; its children are in order already.
        budget_tokens: prompt tokens that may be recomputed.

    Returns:
        `(num_requests,)` number of the run that each leaf leaves with, -1 for those that stay; and the most
        prompt tokens that this can cost.
    """
    n = len(tree)
    parent = np.concatenate((tree.leaf_parent, tree.parent))
    total, density, displacement = _displacements(tree, work, order, stays)
    out_of_order = (parent > top) & (total > 0) & (displacement > MIN_DISPLACEMENT * work.total_s.sum())
    items = np.flatnonzero(out_of_order)
    if len(items) == 0:
        return np.full(n, -1, dtype=np.int64), 0.0
    band = np.full(len(items), np.iinfo(np.int64).max)
    finite = np.isfinite(density[items])
    band[finite] = np.floor(np.log2(density[items][finite]) * RUNS_PER_DOUBLING)
    by_run = np.lexsort((places[items], band, parent[items]))
    items, band = items[by_run], band[by_run]
    begins = (np.diff(parent[items], prepend=-1) != 0) | (np.diff(band, prepend=band[0]) != 0)
    starts = np.flatnonzero(begins)
    gain = np.add.reduceat(total[items] * displacement[items], starts)
    cost = (tree.depth[parent[items[starts]]] - tree.depth[top]).astype(np.float64)
    num_leaves = np.concatenate((np.ones(n, dtype=np.int64), tree.leaf_end - tree.leaf_start))
    leaf_at = np.empty(n, dtype=np.int64)
    leaf_at[places[:n]] = np.arange(n)
    by_worth = np.lexsort((np.arange(len(starts)), -gain / cost))
    bounds = np.append(starts, len(items))
    run, spent = _buy(by_worth, cost, bounds, items, places, num_leaves, leaf_at, stays, budget_tokens)
    return np.asarray(run, dtype=np.int64), float(spent)


def _displacements(
    tree: PrefixTree, work: LeafWork, order: Ints, stays: npt.NDArray[np.bool_]
) -> tuple[Floats, Floats, Floats]:
    """Returns each item's work, density and seconds of work off its place, over the leaves that stay."""
    leaf_total = work.total_s
    middle = np.empty(len(tree))
    middle[order] = np.cumsum(leaf_total[order]) - leaf_total[order] / 2.0
    none = np.zeros(tree.num_nodes)

    def over_nodes(values: Floats) -> Floats:
        summed: Floats = sums_below(tree.parent, tree.leaf_parent, values * stays, none)
        return summed

    total = over_nodes(leaf_total)
    density = compute_density(over_nodes(work.compute_s), over_nodes(work.memory_s))
    place = np.divide(over_nodes(leaf_total * middle), total, out=np.zeros(len(total)), where=total > 0)
    lower = work.done_s[np.searchsorted(work.falling, -density, side="left")]
    upper = work.done_s[np.searchsorted(work.falling, -density, side="right")]
    leaf_off = np.maximum(work.denser_s - middle, middle - work.as_dense_s)
    return (
        np.concatenate((leaf_total * stays, total)),
        np.concatenate((compute_density(work.compute_s, work.memory_s), density)),
        np.maximum(np.concatenate((leaf_off, np.maximum(lower - place, place - upper))), 0.0),
    )


@numba.njit(cache=True, nogil=True)
def _buy(
    by_worth: Ints,
    cost: Floats,
    bounds: Ints,
    items: Ints,
    places: Ints,
    num_leaves: Ints,
    leaf_at: Ints,
    stays: npt.NDArray[np.bool_],
    budget: float,
) -> tuple[Ints, float]:
    """Takes runs by worth while the budget lasts; a leaf goes with the first that names it."""
    run_of = np.full(len(stays), -1, dtype=np.int64)
    num_runs, spent = 0, 0.0
    for candidate in by_worth:
        if spent + cost[candidate] > budget:
            continue
        takes_any = False
        for index in range(bounds[candidate], bounds[candidate + 1]):
            item = items[index]
            for place in range(places[item], places[item] + num_leaves[item]):
                leaf = leaf_at[place]
                if stays[leaf] and run_of[leaf] < 0:
                    run_of[leaf] = num_runs
                    takes_any = True
        if takes_any:
            num_runs += 1
            spent += cost[candidate]
    return run_of, spent
