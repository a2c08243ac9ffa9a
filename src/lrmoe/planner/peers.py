# mypy: ignore-errors
"""Other systems' placement policies: counts in, instances and forward split out.

Each is written from the public description of its mechanism, with its published constants as
defaults (``PlanProblem.options`` changes them), and works with every quota mode. What all of them
share here, whatever their own system does: dropless execution, this library's kernels, one instance
of an expert per rank (two copies on one rank become one with twice the weight), and home experts
that never move. Policies that re-place experts (SYMI, EPLB, FlexMoE, SmartMoE, LAER) are modelled
with replicas of the moved experts in their new places while the home copy gets no pairs; that takes
more slots than the policy's own redundant ones (:func:`slots_per_rank`) and moves weights in every
call instead of optimizer state now and then. Policies that look at history place at home as long as
there is none. In training the history is of layer calls: with gradient accumulation a policy that
was published for iterations sees micro-batches.

Shape letters: W = ranks, E = experts, V = instances (rank-major), X = exports (an expert's pairs
that leave home for one other rank), P = physical slots of a policy without a home.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit

from lrmoe.planner import kernels
from lrmoe.planner.problem import Int, PlanProblem
from lrmoe.planner.recalibrated import lay_out, place_at_home
from lrmoe.planner.settle import MOVING, Placement

DEFAULT_SLOTS = 2
_jit = njit(cache=True, error_model="numpy")


def slots_per_rank(placement: str, W: int, E: int, slots: int | None) -> int:
    """Replica slots a live layer needs for a policy that is given ``slots`` redundant ones."""
    if placement == "fixed":
        return 0
    own = DEFAULT_SLOTS if slots is None else slots
    if placement == "smartmoe":
        return -(-E // W)
    if placement in MOVING:
        return -(-E // W) + own
    if slots is None and placement in ("llep", "fastermoe", "recalibrated"):
        return E
    return own


def fixed(problem: PlanProblem) -> Placement:
    """Every pair on its expert's home rank ``e // (E / W)``, as in Megatron-LM."""
    return place_at_home(problem, kernels.sums(problem.counts_WE))


def symi(problem: PlanProblem) -> Placement:
    """SYMI (arXiv 2504.19925): as many copies of each expert as its last share of the pairs asks.

    All slots are always full, class by class in rank order; the counts are those of the previous
    iteration, so exact loads are not looked at. SYMI drops what exceeds an instance's capacity;
    here nothing is dropped, and the instances of an expert get even shares.
    """
    W, E = problem.counts_WE.shape
    per_rank = -(-E // W) + _slots(problem)
    past = problem.past_counts_SWE
    load_E = np.ones(E, np.int64) if past is None or not len(past) else past[-1].sum(0)
    copies_E = symi_copies(load_E, W * per_rank)
    of_P = np.repeat(np.arange(E), copies_E)
    return _placed_evenly(problem, _count_copies(of_P, np.arange(len(of_P)) // per_rank, E, W))


def symi_copies(load_E: Int, slots: int) -> Int:
    """Copies of each class, at least one, adding up to the slots."""
    if load_E.sum() == 0:
        load_E = np.ones_like(load_E)
    goal_E = load_E / load_E.sum() * slots
    copies_E = np.maximum(1, np.floor(goal_E).astype(np.int64))
    while copies_E.sum() > slots:
        copies_E[np.where(copies_E > 1, copies_E - goal_E, -np.inf).argmax()] -= 1
    while copies_E.sum() < slots:
        copies_E[(copies_E - goal_E).argmin()] += 1
    return copies_E


def eplb(problem: PlanProblem) -> Placement:
    """EPLB (https://github.com/deepseek-ai/EPLB): copies of the experts with the largest past load.

    Load is the sum of the history given; pairs are dealt evenly to the copies. With
    ``options={"groups": g}`` and several nodes the hierarchical variant: groups are packed on nodes
    first. EPLB does not say when to re-place; here in every call, from the same history the same.
    """
    W, E = problem.counts_WE.shape
    past = problem.past_counts_SWE
    if past is None or not len(past):
        return fixed(problem)
    per_rank = -(-E // W) + _slots(problem)
    options = _options(problem, groups=1)
    nodes = problem.num_nodes if int(options["groups"]) % problem.num_nodes == 0 else 1
    groups = int(options["groups"]) if nodes > 1 else 1
    of_P = eplb_slots(past.sum((0, 1)), W * per_rank, groups, nodes, W)
    return _placed_evenly(problem, _count_copies(of_P, np.arange(len(of_P)) // per_rank, E, W))


def eplb_slots(load_E: Int, slots: int, groups: int, nodes: int, ranks: int) -> Int:
    """The expert of every physical slot, slots in rank order.

    Groups of experts go to nodes, heaviest first to the lightest node with room; in a node, one
    more copy at a time for the expert with the most load per copy; then the copies go to ranks like
    the groups to nodes.
    """
    E = len(load_E)
    per_group, per_node = E // groups, slots // nodes
    load_E = load_E.astype(np.float64)
    node_of_G, place_of_G = _pack(load_E.reshape(groups, per_group).sum(1), nodes)
    expert_P = np.empty(slots, np.int64)
    for node in range(nodes):
        mine = np.flatnonzero(node_of_G == node)
        mine = mine[np.argsort(place_of_G[mine])]
        experts = (mine[:, None] * per_group + np.arange(per_group)).ravel()
        of_slot, copies = _replicate(load_E[experts], per_node)
        rank, place = _pack((load_E[experts] / copies)[of_slot], ranks // nodes)
        position = rank * (slots // ranks) + place
        expert_P[node * per_node + position] = experts[of_slot]
    return expert_P


def ultraep(problem: PlanProblem) -> Placement:
    """UltraEP (arXiv 2606.04101, https://github.com/Dots-Infra/UltraEP): quotas for replicas.

    Exact counts; the least threshold for which every rank above it can export what is too much into
    the free slot with the most slack, heaviest rank and expert first. Replicas below
    ``min_tokens`` pairs are only made where they take the last of a rank's excess (its tests call
    the minimum soft, and so it reproduces the replica counts the project publishes), the home copy
    keeps one pair, and replicas stay inside the node. Sources fill their own instance and spread
    the rest in proportion to what is left.
    """
    W = len(problem.counts_WE)
    options = _options(problem, min_tokens=1024, slack=0.01, keep=1)
    load_E = kernels.sums(problem.counts_WE)
    expert_X, rank_X, pairs_X = ultraep_quotas(
        load_E, W, problem.node_size, _slots(problem), int(options["min_tokens"]),
        float(options["slack"]), int(options["keep"]),
    )  # fmt: skip
    return _placed_in_proportion(problem, load_E, expert_X, rank_X, pairs_X)


@_jit
def ultraep_quotas(load_E, W, domain, slots, min_tokens, slack, keep):
    """Exports: the expert, the rank and the pairs of every replica."""
    E = len(load_E)
    out_3X = np.empty((3, 2 * W + E), np.int64)
    load_W = np.zeros(W, np.int64)
    for e in range(E):
        load_W[e * W // E] += load_E[e]
    num = 0
    for first in range(0, W, domain):
        total, top = 0, 0
        for r in range(first, first + domain):
            total += load_W[r]
            top = max(top, load_W[r])
        low = (total + domain - 1) // domain
        threshold, step = int(np.ceil(low * (1.0 + slack))), max(1, (top + 99) // 100)
        made = -1
        for _ in range(3):
            made = _ultraep_exports(
                load_E, load_W, first, domain, threshold, slots, min_tokens, keep, out_3X, num
            )
            if made >= 0:
                break
            threshold = min(top, threshold + step)
        if made < 0:
            high = top
            while low < high:
                threshold = (low + high) // 2
                if (
                    _ultraep_exports(
                        load_E,
                        load_W,
                        first,
                        domain,
                        threshold,
                        slots,
                        min_tokens,
                        keep,
                        out_3X,
                        num,
                    )
                    >= 0
                ):
                    high = threshold
                else:
                    low = threshold + 1
            made = _ultraep_exports(
                load_E, load_W, first, domain, low, slots, min_tokens, keep, out_3X, num
            )
        num += max(made, 0)
    return out_3X[0, :num], out_3X[1, :num], out_3X[2, :num]


@_jit
def _ultraep_exports(
    load_E, load_W, first, domain, threshold, slots, min_tokens, keep, out_3X, start
):
    """Exports of one domain at a threshold; their number, or -1 if it cannot be kept to."""
    W, E = len(load_W), len(load_E)
    slack_W = np.zeros(W, np.int64)
    used_W = np.zeros(W, np.int64)
    total_slack = 0
    for r in range(first, first + domain):
        slack_W[r] = max(0, threshold - load_W[r])
        total_slack += slack_W[r]
    num = start
    is_seen_W = np.zeros(W, np.bool_)
    for _ in range(domain):
        a = -1
        for r in range(first, first + domain):
            if not is_seen_W[r] and (a < 0 or load_W[r] > load_W[a]):
                a = r
        is_seen_W[a] = True
        need = load_W[a] - threshold
        if need <= 0:
            break
        if need > total_slack:
            return -1
        begin, end = (a * E + W - 1) // W, ((a + 1) * E + W - 1) // W
        is_used_E = np.zeros(end - begin, np.bool_)
        for _ in range(end - begin):
            e = -1
            for f in range(begin, end):
                if not is_used_E[f - begin] and (e < 0 or load_E[f] > load_E[e]):
                    e = f
            is_used_E[e - begin] = True
            available = load_E[e] - keep
            last = -1
            while need > 0 and available > 0:
                d = -1
                for r in range(first, first + domain):
                    if slack_W[r] > 0 and used_W[r] < slots and r != last:
                        q = min(min(need, slack_W[r]), available)
                        if q >= min(min_tokens, need) and (d < 0 or slack_W[r] > slack_W[d]):
                            d = r
                if d < 0:
                    break
                q = min(min(need, slack_W[d]), available)
                out_3X[0, num], out_3X[1, num], out_3X[2, num] = e, d, q
                num += 1
                need -= q
                available -= q
                slack_W[d] -= q
                total_slack -= q
                used_W[d] += 1
                last = d
            if need == 0:
                break
        if need > 0:
            return -1
    return num - start


def fastermoe(problem: PlanProblem) -> Placement:
    """FasterMoE's shadowing (https://github.com/laekov/fastmoe): hot experts go to all ranks.

    The model sees one expert per rank: with B_i the i-th largest expert load, the latency with i
    shadows is ``B_{i+1} (computation + 4 token transfers) + i model transfers``; shadows are added
    while it falls. Every rank computes its own pairs of a shadowed expert. The prices are the
    problem's costs; if those have no links, the published defaults (V100, 50 Gb/s, a two-matrix MLP
    in fp32).
    """
    W, E = problem.counts_WE.shape
    load_E = kernels.sums(problem.counts_WE)
    costs = problem.costs
    link = costs.inter_byte if problem.num_nodes > 1 else costs.intra_byte
    if link and costs.row_bytes and costs.expert_bytes:
        per_pair = costs.forward_pair + costs.backward_pair + 4 * costs.row_bytes * link
        per_model = costs.expert_bytes * link
    else:
        d, alpha = 2048.0, 2.0
        per_pair = 3 * 4 * alpha * d * d / 11.5e12 + 4 * d * 4 / 6.25e9
        per_model = 2 * alpha * d * d * 4 / 6.25e9
    options = _options(problem, pair=per_pair, model=per_model)
    shadowed = fastermoe_shadows(load_E, float(options["pair"]), float(options["model"]))
    limit = problem.budgets.slots
    relaxed: tuple[str, ...] = ()
    if limit is not None and len(shadowed) > limit:
        shadowed = shadowed[:limit]
        relaxed = (f"slots: FasterMoE would shadow more than {limit} experts",)
    expert_X = np.repeat(shadowed, W - 1)
    home_X = expert_X * W // E
    rank_X = np.tile(np.arange(W - 1), len(shadowed))
    rank_X += rank_X >= home_X
    pairs_X = problem.counts_WE[rank_X, expert_X]
    placed = lay_out(problem, load_E, expert_X, rank_X, pairs_X)
    # An interval split that fills own instances first leaves nothing for other ranks' shadows.
    return _with(placed, relaxed=relaxed)


def fastermoe_shadows(load_E: Int, per_pair: float, per_model: float) -> Int:
    """Experts to shadow, heaviest first."""
    order_E = np.argsort(-load_E, kind="stable")
    best, count = per_pair * load_E[order_E[0]], 0
    for i in range(1, len(order_E)):
        latency = per_pair * load_E[order_E[i]] + i * per_model
        if latency >= best:
            break
        best, count = latency, i
    return order_E[:count]


def flexmoe(problem: PlanProblem) -> Placement:
    """FlexMoE (arXiv 2304.03946): expand the most loaded expert, shrink the least, while it pays.

    Load is that of the last step. While max / mean over ranks is above ``threshold``: one more copy
    of the expert with the most load per copy, on the least loaded rank with a free slot; without a
    free slot, one copy less of the expert with the least load per copy that has several. A step
    counts if the modelled time (computation, and the gradient all-reduce of copies) falls. Starts
    from home in every call; the published system moves step by step between iterations.
    """
    W, E = problem.counts_WE.shape
    past = problem.past_counts_SWE
    if past is None or not len(past):
        return fixed(problem)
    options = _options(problem, threshold=1.2)
    costs = problem.costs
    per_pair = costs.forward_pair + costs.backward_pair
    link = costs.inter_byte if problem.num_nodes > 1 else costs.intra_byte
    copies_EW = flexmoe_copies(
        past[-1].sum(0), W, -(-E // W) + _slots(problem), float(options["threshold"]), per_pair,
        2.0 * costs.gradient_bytes * link,
    )  # fmt: skip
    return _placed_evenly(problem, copies_EW)


@_jit
def flexmoe_copies(load_E, W, per_rank, threshold, per_pair, per_copy):
    """Copies of each expert on each rank."""
    E = len(load_E)
    copies_EW = np.zeros((E, W), np.int64)
    count_E = np.ones(E, np.int64)
    used_W = np.zeros(W, np.int64)
    for e in range(E):
        copies_EW[e, e * W // E] = 1
        used_W[e * W // E] += 1
    mean = load_E.sum() / W
    for _ in range(4 * W * per_rank):
        rank_load_W = _even_loads(load_E, copies_EW, count_E)
        before = per_pair * rank_load_W.max() + per_copy * (count_E.sum() - E)
        if rank_load_W.max() <= threshold * mean:
            break
        hot = 0
        for e in range(E):
            if load_E[e] * count_E[hot] > load_E[hot] * count_E[e]:
                hot = e
        target, source, cold = -1, -1, -1
        for r in range(W):
            is_lower = target < 0 or rank_load_W[r] < rank_load_W[target]
            if used_W[r] < per_rank and copies_EW[hot, r] == 0 and is_lower:
                target = r
        if target < 0:  # no free slot: one of the coldest expert's with several copies
            for e in range(E):
                is_colder = cold < 0 or load_E[e] * count_E[cold] < load_E[cold] * count_E[e]
                if count_E[e] > 1 and e != hot and is_colder:
                    cold = e
            if cold < 0:
                break
            for r in range(W):
                is_lower = source < 0 or rank_load_W[r] < rank_load_W[source]
                if copies_EW[cold, r] > 0 and copies_EW[hot, r] == 0 and is_lower:
                    source = r
            if source < 0:
                break
            copies_EW[cold, source] -= 1
            count_E[cold] -= 1
            used_W[source] -= 1
            target = source
        copies_EW[hot, target] += 1
        count_E[hot] += 1
        used_W[target] += 1
        after = per_pair * _even_loads(load_E, copies_EW, count_E).max() + per_copy * (
            count_E.sum() - E
        )
        if after > before:  # equal: two hot experts on one rank take two steps to help
            copies_EW[hot, target] -= 1
            count_E[hot] -= 1
            if cold >= 0:
                copies_EW[cold, source] += 1
                count_E[cold] += 1
            break
    return copies_EW


@_jit
def _even_loads(load_E, copies_EW, count_E):
    """Load of each rank if every copy of an expert gets the same."""
    E, W = copies_EW.shape
    load_W = np.zeros(W)
    for e in range(E):
        for r in range(W):
            load_W[r] += copies_EW[e, r] * load_E[e] / count_E[e]
    return load_W


def smartmoe(problem: PlanProblem) -> Placement:
    """SmartMoE's online placement (ATC'23, https://github.com/zms1999/SmartMoE): a permutation.

    The mean load of the history given, experts heaviest first to the least loaded rank that has
    fewer than E / W; used if the largest predicted rank load falls by more than ``margin``.
    """
    W, E = problem.counts_WE.shape
    past = problem.past_counts_SWE
    if past is None or not len(past):
        return fixed(problem)
    options = _options(problem, margin=0.05)
    load_E = past.sum((0, 1)).astype(np.float64)
    rank_E, _ = _pack(load_E, W) if E % W == 0 else (np.arange(E) * W // E, None)
    after = np.bincount(rank_E, weights=load_E, minlength=W).max()
    before = np.bincount(np.arange(E) * W // E, weights=load_E, minlength=W).max()
    if after > (1 - float(options["margin"])) * before:
        return fixed(problem)
    return _placed_evenly(problem, _count_copies(np.arange(E), rank_E, E, W))


def laer(problem: PlanProblem) -> Placement:
    """LAER-MoE (arXiv 2602.11686, https://github.com/PKU-DAIR/Hetu-Galvatron, branch laer-moe).

    From the counts of the last five steps, two candidates: the same number of copies for every
    expert, and copies by load in rounds of a node each. Copies go, heaviest first, to the least
    loaded rank on the nodes with the fewest of that expert. The candidate with the lower modelled
    time wins (four token exchanges and three computations). A source deals its pairs to the
    instances in its node, and only if there is none, to all.
    """
    W, E = problem.counts_WE.shape
    past = problem.past_counts_SWE
    if past is None or not len(past):
        return fixed(problem)
    counts_WE = past[-5:].sum(0)
    load_E = counts_WE.sum(0)
    per_rank, nodes = -(-E // W) + _slots(problem), problem.num_nodes
    candidates = [laer_copies(load_E, W * per_rank, nodes)]
    if W * per_rank % E == 0:
        candidates.insert(0, np.full(E, W * per_rank // E))
    best: Placement | None = None
    best_cost = np.inf
    costs = problem.costs
    for copies_E in candidates:
        copies_EW = laer_places(load_E, copies_E, W, per_rank, problem.node_size)
        placed = _placed_in_nodes(problem, copies_EW, counts_WE)
        by_rank_WW = np.add.reduceat(placed.forward_WV, placed.begin_W[:-1], axis=1)
        near_WW = (
            np.arange(W)[:, None] // problem.node_size == np.arange(W)[None, :] // problem.node_size
        )
        away_WW = np.where(np.eye(W, dtype=bool), 0, by_rank_WW)
        moved = costs.row_bytes * (
            costs.intra_byte * away_WW[near_WW].sum() + costs.inter_byte * away_WW[~near_WW].sum()
        )
        cost = 4 * moved + 3 * costs.forward_pair * by_rank_WW.sum(0).max()
        if cost < best_cost:
            best, best_cost = _placed_in_nodes(problem, copies_EW, problem.counts_WE), cost
    assert best is not None
    return best


@_jit
def laer_copies(load_E, slots, nodes):
    """Copies of each expert: by load per copy, singly up to one per node, then by node-rounds."""
    E = len(load_E)
    copies_E = np.full(E, nodes if nodes * E <= slots else 1)
    is_open_E = np.ones(E, np.bool_)
    used = copies_E.sum()
    while used < slots:
        best = -1
        for e in range(E):
            if is_open_E[e] and (
                best < 0 or load_E[e] * copies_E[best] > load_E[best] * copies_E[e]
            ):
                best = e
        if best < 0:
            break
        more = nodes if copies_E[best] >= nodes else 1
        if used + more > slots:
            is_open_E[best] = False
            continue
        copies_E[best] += more
        used += more
    return copies_E


@_jit
def laer_places(load_E, copies_E, W, per_rank, node_size):
    """Copies of each expert on each rank, heaviest copy first."""
    E = len(load_E)
    copies_EW = np.zeros((E, W), np.int64)
    used_W, load_W = np.zeros(W, np.int64), np.zeros(W)
    in_node = np.zeros((E, W // node_size), np.int64)
    order_E = np.argsort(-(load_E / copies_E), kind="mergesort")
    for e in order_E:
        for _ in range(copies_E[e]):
            best = -1
            fewest = in_node[e].min()
            for strict in range(2):
                for r in range(W):
                    if used_W[r] >= per_rank:
                        continue
                    if strict == 0 and in_node[e, r // node_size] > fewest:
                        continue
                    if best < 0 or load_W[r] < load_W[best]:
                        best = r
                if best >= 0:
                    break
            copies_EW[e, best] += 1
            used_W[best] += 1
            load_W[best] += load_E[e] / copies_E[e]
            in_node[e, best // node_size] += 1
    return copies_EW


def llep(problem: PlanProblem) -> Placement:
    """LLEP (arXiv 2601.17111, https://github.com/SalesforceAIResearch/LeastLoadedEP).

    Exact counts. Below ``threshold`` max / mean over ranks (as the released code measures it)
    nothing moves. Otherwise every rank may take ``alpha`` times the mean: experts heaviest first,
    the home rank what it has room for beside its experts still to come, the rest in contiguous
    parts to the least loaded others; parts under ``min_tokens`` are skipped unless they are the
    end, and what fits nowhere goes to the least loaded rank whole.
    """
    W, E = problem.counts_WE.shape
    options = _options(problem, alpha=1.0, threshold=1.3, min_tokens=1024)
    load_E = kernels.sums(problem.counts_WE)
    load_W = np.bincount(np.arange(E) * W // E, weights=load_E, minlength=W)
    if load_W.max() < float(options["threshold"]) * load_W.mean():
        return place_at_home(problem, load_E)
    slots = E if problem.budgets.slots is None else problem.budgets.slots
    expert_X, rank_X, pairs_X = llep_spills(
        load_E, W, float(options["alpha"]), int(options["min_tokens"]), slots
    )
    return _placed_in_ranges(problem, load_E, expert_X, rank_X, pairs_X)


@_jit
def llep_spills(load_E, W, alpha, min_tokens, slots):
    """Exports in the order in which they were made, which is that of the experts' ranges."""
    E = len(load_E)
    cap = max(1, int(alpha * (load_E.sum() // W)))
    taken_W, pending_W = np.zeros(W, np.int64), np.zeros(W, np.int64)
    used_W = np.zeros(W, np.int64)
    for e in range(E):
        pending_W[e * W // E] += load_E[e]
    expert_X, rank_X = np.empty(E * W, np.int64), np.empty(E * W, np.int64)
    pairs_X = np.empty(E * W, np.int64)
    num = 0
    for e in np.argsort(-load_E, kind="mergesort"):
        h = e * W // E
        rest = load_E[e]
        if rest == 0:
            continue
        pending_W[h] -= rest
        at_home = min(rest, max(0, cap - taken_W[h] - pending_W[h]))
        taken_W[h] += at_home
        rest -= at_home
        is_given_W = np.zeros(W, np.bool_)
        while rest > 0:
            best, least, fallback = -1, 0, -1
            for r in range(W):
                if r == h or is_given_W[r] or used_W[r] >= slots:
                    continue
                load = taken_W[r] + pending_W[r]
                if fallback < 0 or load < taken_W[fallback] + pending_W[fallback]:
                    fallback = r
                chunk = min(rest, cap - load)
                if chunk <= 0 or (chunk < min_tokens and rest > chunk):
                    continue
                if best < 0 or load < least:
                    best, least = r, load
            d, q = best, 0
            if best >= 0:
                q = min(rest, cap - least)
            elif fallback >= 0:
                d, q = fallback, rest
            else:  # no other rank has a slot left
                taken_W[h] += rest
                break
            expert_X[num], rank_X[num], pairs_X[num] = e, d, q
            num += 1
            taken_W[d] += q
            used_W[d] += 1
            is_given_W[d] = True
            rest -= q
    return expert_X[:num], rank_X[:num], pairs_X[:num]


def topology(problem: PlanProblem) -> Placement:
    """Topology-cost transport: stands for TopoEP, of which nothing public was found.

    After the public description of TAOT (arXiv 2608.03676): the ranks' overflow above the mean and
    the room below it are an entropy-regularised transport problem whose costs are those of the
    links. Its flow between ranks is a hint, rounded to replicas: ranks with the largest overflow
    first, to the ranks that get most of their flow first, as much as there is room for (a slot is
    scarcer than what the flow's tail would put in it), experts heaviest first.
    """
    W = len(problem.counts_WE)
    options = _options(problem, inter_cost=4.0, epsilon=0.5, rounds=50)
    load_E = kernels.sums(problem.counts_WE)
    exports = transport_exports(
        load_E, W, problem.node_size, _slots(problem), float(options["inter_cost"]),
        float(options["epsilon"]), int(options["rounds"]),
    )  # fmt: skip
    return lay_out(problem, load_E, *exports)


@_jit
def transport_flow(over_W, room_W, node_size, inter_cost, epsilon, rounds):
    """Sinkhorn: the cheapest flow, blurred by ``epsilon``, from overflow to room."""
    W = len(over_W)
    scale = over_W.sum() / max(room_W.sum(), 1)
    kernel_WW = np.empty((W, W))
    for a in range(W):
        for d in range(W):
            cost = 1.0 if a // node_size == d // node_size else inter_cost
            kernel_WW[a, d] = np.exp(-cost / epsilon)
    row_W, column_W = np.ones(W), np.ones(W)
    for _ in range(rounds):
        for a in range(W):
            total = 0.0
            for d in range(W):
                total += kernel_WW[a, d] * column_W[d]
            row_W[a] = over_W[a] / total if total > 0 else 0.0
        for d in range(W):
            total = 0.0
            for a in range(W):
                total += kernel_WW[a, d] * row_W[a]
            column_W[d] = scale * room_W[d] / total if total > 0 else 0.0
    for a in range(W):
        for d in range(W):
            kernel_WW[a, d] *= row_W[a] * column_W[d]
    return kernel_WW


@_jit
def transport_exports(load_E, W, node_size, slots, inter_cost, epsilon, rounds):
    """Exports along the flow, the largest first."""
    E = len(load_E)
    load_W = np.zeros(W, np.int64)
    for e in range(E):
        load_W[e * W // E] += load_E[e]
    mean = (load_W.sum() + W - 1) // W
    over_W, room_W = np.maximum(load_W - mean, 0), np.maximum(mean - load_W, 0)
    out_3X, num = np.empty((3, W * slots), np.int64), 0
    if over_W.sum() == 0 or slots == 0:
        return out_3X[0, :0], out_3X[1, :0], out_3X[2, :0]
    flow_WW = transport_flow(over_W, room_W, node_size, inter_cost, epsilon, rounds)
    free_W = np.full(W, slots)
    left_E = load_E.copy()
    is_on_EW = np.zeros((E, W), np.bool_)
    for a in np.argsort(-over_W, kind="mergesort"):
        need = over_W[a]
        begin, end = (a * E + W - 1) // W, ((a + 1) * E + W - 1) // W
        is_tried_W = np.zeros(W, np.bool_)
        while need > 0:
            d = -1
            for r in range(W):
                is_more = d < 0 or flow_WW[a, r] > flow_WW[a, d]
                if room_W[r] > 0 and free_W[r] > 0 and not is_tried_W[r] and is_more:
                    d = r
            if d < 0:
                break
            is_tried_W[d] = True
            while need > 0 and room_W[d] > 0 and free_W[d] > 0:
                e = -1
                for f in range(begin, end):
                    if not is_on_EW[f, d] and left_E[f] > 0 and (e < 0 or left_E[f] > left_E[e]):
                        e = f
                if e < 0:
                    break
                q = min(min(need, room_W[d]), left_E[e])
                out_3X[0, num], out_3X[1, num], out_3X[2, num] = e, d, q
                num += 1
                is_on_EW[e, d] = True
                left_E[e] -= q
                need -= q
                room_W[d] -= q
                free_W[d] -= 1
    return out_3X[0, :num], out_3X[1, :num], out_3X[2, :num]


POLICIES: dict[str, Callable[[PlanProblem], Placement]] = {
    "fixed": fixed,
    "symi": symi,
    "ultraep": ultraep,
    "eplb": eplb,
    "fastermoe": fastermoe,
    "flexmoe": flexmoe,
    "smartmoe": smartmoe,
    "laer": laer,
    "llep": llep,
    "topology": topology,
}


# ---- shared ------------------------------------------------------------------------------------


def _slots(problem: PlanProblem) -> int:
    """Redundant slots per rank of policies that always have some; two, as in UltraEP's runs."""
    return DEFAULT_SLOTS if problem.budgets.slots is None else problem.budgets.slots


def _options(problem: PlanProblem, **defaults: float) -> dict[str, float]:
    """The policy's constants with the problem's changes."""
    for name in problem.options:
        if name not in defaults:
            raise ValueError(
                f"options: {name!r} is not a constant of placement={problem.placement!r}; allowed "
                f"are {', '.join(map(repr, defaults)) or 'none'}"
            )
    return defaults | dict(problem.options)


@_jit
def _pack(weight_N, packs):
    """Heaviest first into the lightest pack that has room, all packs of equal size.

    Returns:
        The pack of each item, and its place in the pack.
    """
    N = len(weight_N)
    room = N // packs
    pack_N, place_N = np.empty(N, np.int64), np.empty(N, np.int64)
    if room == 1:
        for i in range(N):
            pack_N[i], place_N[i] = i, 0
        return pack_N, place_N
    load, used = np.zeros(packs), np.zeros(packs, np.int64)
    for i in np.argsort(-weight_N, kind="mergesort"):
        best = -1
        for p in range(packs):
            if used[p] < room and (best < 0 or load[p] < load[best]):
                best = p
        pack_N[i], place_N[i] = best, used[best]
        load[best] += weight_N[i]
        used[best] += 1
    return pack_N, place_N


@_jit
def _replicate(load_E, slots):
    """The expert of each slot: all once, then one more of the largest load per copy at a time."""
    E = len(load_E)
    of_slot = np.arange(slots)
    copies_E = np.ones(E, np.int64)
    for i in range(E, slots):
        best = 0
        for e in range(E):
            if load_E[e] / copies_E[e] > load_E[best] / copies_E[best]:
                best = e
        of_slot[i] = best
        copies_E[best] += 1
    return of_slot, copies_E


def _count_copies(expert_P: Int, rank_P: Int, E: int, W: int) -> Int:
    """Copies of each expert on each rank."""
    copies_EW = np.zeros((E, W), np.int64)
    np.add.at(copies_EW, (expert_P, rank_P), 1)
    return copies_EW


def _instances(problem: PlanProblem, copies_EW: Int) -> tuple[Placement, Int]:
    """Instances for the copies, without a split yet, and the copies each stands for."""
    E, W = copies_EW.shape
    is_away_EW = copies_EW > 0
    is_away_EW[np.arange(E), np.arange(E) * W // E] = False
    expert_X, rank_X = np.nonzero(is_away_EW)
    placed = lay_out(
        problem,
        kernels.sums(problem.counts_WE),
        expert_X,
        rank_X,
        np.zeros(len(expert_X), np.int64),
    )
    return placed, copies_EW[placed.instance_expert_V, placed.instance_rank_V]


def _with(placed: Placement, **changes: object) -> Placement:
    values = {name: getattr(placed, name) for name in Placement.__dataclass_fields__}
    return Placement(**(values | changes))


def _placed_evenly(problem: PlanProblem, copies_EW: Int) -> Placement:
    """Every source deals its pairs of an expert round robin to the copies."""
    placed, copies_V = _instances(problem, copies_EW)
    forward_WV = np.zeros((len(problem.counts_WE), len(copies_V)), np.int64)
    _deal(problem.counts_WE, copies_V, placed.start_E, placed.of_V, forward_WV)
    return _with(placed, forward_WV=forward_WV, total_V=forward_WV.sum(0))


def _placed_in_nodes(problem: PlanProblem, copies_EW: Int, counts_WE: Int) -> Placement:
    """Every source deals round robin to the copies in its node; if there is none, to all."""
    placed, copies_V = _instances(problem, copies_EW)
    forward_WV = np.zeros((len(counts_WE), len(copies_V)), np.int64)
    node_size = problem.node_size
    for node in range(problem.num_nodes):
        here = slice(node * node_size, (node + 1) * node_size)
        near_V = np.where(placed.instance_rank_V // node_size == node, copies_V, 0)
        has_near_E = np.bincount(placed.instance_expert_V, weights=near_V) > 0
        used_V = np.where(has_near_E[placed.instance_expert_V], near_V, copies_V)
        _deal(counts_WE[here], used_V, placed.start_E, placed.of_V, forward_WV[here])
    return _with(placed, forward_WV=forward_WV, total_V=forward_WV.sum(0))


@_jit
def _deal(counts_WE, copies_V, start_E, of_V, forward_WV):
    """Deal each source's pairs to the copies; the rest goes on where the last one's ended."""
    W, E = counts_WE.shape
    for e in range(E):
        copies = 0
        for i in range(start_E[e], start_E[e + 1]):
            copies += copies_V[of_V[i]]
        turn = 0
        for r in range(W):
            n = counts_WE[r, e]
            place = 0
            for i in range(start_E[e], start_E[e + 1]):
                v = of_V[i]
                q = n // copies * copies_V[v]
                for _ in range(copies_V[v]):
                    if (place - turn) % copies < n % copies:
                        q += 1
                    place += 1
                forward_WV[r, v] = q
            turn = (turn + n % copies) % copies


def _placed_in_proportion(
    problem: PlanProblem, load_E: Int, expert_X: Int, rank_X: Int, pairs_X: Int
) -> Placement:
    """Own instance first; the rest in proportion to the instances' room, by largest remainder."""
    placed = lay_out(problem, load_E, expert_X, rank_X, pairs_X)
    if placed.forward_WV is not None:
        return placed
    forward_WV = np.zeros((len(problem.counts_WE), len(placed.total_V)), np.int64)
    _spread(
        problem.counts_WE, placed.instance_rank_V, placed.total_V, placed.start_E, placed.of_V,
        forward_WV,
    )  # fmt: skip
    return _with(placed, forward_WV=forward_WV)


@_jit
def _spread(counts_WE, rank_V, total_V, start_E, of_V, forward_WV):
    W, E = counts_WE.shape
    room_V, rest_V, share_V = total_V.copy(), total_V.copy(), total_V.copy()
    for e in range(E):
        first, end = start_E[e], start_E[e + 1]
        if end - first == 1:
            for r in range(W):
                forward_WV[r, of_V[first]] = counts_WE[r, e]
            continue
        for i in range(first, end):
            v = of_V[i]
            forward_WV[rank_V[v], v] = min(counts_WE[rank_V[v], e], total_V[v])
            room_V[v] -= forward_WV[rank_V[v], v]
        rooms = 0
        for i in range(first, end):
            rooms += room_V[of_V[i]]
        for r in range(W):
            n = counts_WE[r, e]
            for i in range(first, end):
                n -= forward_WV[r, of_V[i]]
            if n == 0:
                continue
            left = n
            for i in range(first, end):
                v = of_V[i]
                rest_V[v] = n * room_V[v] % rooms
                share_V[v] = n * room_V[v] // rooms
                left -= share_V[v]
            for _ in range(left):
                best = of_V[first]
                for i in range(first, end):
                    if rest_V[of_V[i]] > rest_V[best]:
                        best = of_V[i]
                share_V[best] += 1
                rest_V[best] = -1
            for i in range(first, end):
                v = of_V[i]
                forward_WV[r, v] += share_V[v]
                room_V[v] -= share_V[v]
            rooms -= n


def _placed_in_ranges(
    problem: PlanProblem, load_E: Int, expert_X: Int, rank_X: Int, pairs_X: Int
) -> Placement:
    """An expert's pairs in source order: the first part at home, then the exports as they came."""
    placed = lay_out(problem, load_E, expert_X, rank_X, pairs_X)
    if placed.forward_WV is not None:
        return placed
    forward_WV = np.zeros((len(problem.counts_WE), len(placed.total_V)), np.int64)
    _cut(
        problem.counts_WE, placed.instance_rank_V, placed.total_V, placed.start_E, placed.of_V,
        expert_X, rank_X, forward_WV,
    )  # fmt: skip
    return _with(placed, forward_WV=forward_WV)


@_jit
def _cut(counts_WE, rank_V, total_V, start_E, of_V, expert_X, rank_X, forward_WV):
    W, E = counts_WE.shape
    taken_E = np.zeros(E, np.int64)  # pairs given away so far, sources in order
    source_E = np.zeros(E, np.int64)
    given_E = np.zeros(E, np.int64)  # of the current source
    for x in range(-E, len(expert_X)):
        e = x + E if x < 0 else expert_X[x]
        rank = e * W // E if x < 0 else rank_X[x]
        v = -1
        for i in range(start_E[e], start_E[e + 1]):
            if rank_V[of_V[i]] == rank:
                v = of_V[i]
        left = total_V[v]
        taken_E[e] += left
        while left > 0:
            r = source_E[e]
            q = min(left, counts_WE[r, e] - given_E[e])
            forward_WV[r, v] += q
            left -= q
            given_E[e] += q
            if given_E[e] == counts_WE[r, e]:
                source_E[e] += 1
                given_E[e] = 0
