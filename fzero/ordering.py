"""The order of a compiled step: where in the graph collectives are launched and waited for.

Traced as they come, a gather or scatter is followed by its wait, and nothing overlaps. `Ordering` moves the nodes of
the graph: a wait behind the work that does not need it, the launch of a gather ahead of it. In stage 3 it also gathers
a block's parameters again in front of their first use in backward, so that they do not live from forward to there.
Inductor then has to keep that order.
"""

import hashlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from fzero import collectives, comm, direct

_c10d = torch.ops._c10d_functional  # noqa: SLF001
_GATHERS = (_c10d.all_gather_into_tensor.default, torch.ops.fzero.all_gather.default)
_SCATTERS = (_c10d.all_to_all_single.default, _c10d.reduce_scatter_tensor.default)
_WAIT = _c10d.wait_tensor.default


def source() -> str:
    """Return a hash of the code that decides what a graph becomes: part of the key of every cache."""
    text = "".join(inspect.getsource(module) for module in (sys.modules[__name__], collectives, comm, direct))
    return hashlib.sha256(f"{torch.__version__}{text}".encode()).hexdigest()


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.is_view  # noqa: SLF001


class Ordering(CustomGraphPass):
    """Moves collectives and their waits within a graph; see `fzero.Overlap` for the two numbers."""

    def __init__(self, stage: int, prefetch: int | None, in_flight: int, outside: int) -> None:
        self.stage, self.prefetch, self.in_flight, self.outside = stage, prefetch, in_flight, outside

    def uuid(self) -> str:
        """Return what stands for this pass in inductor's cache key."""
        return f"fzero {self.stage} {self.prefetch} {self.in_flight} {self.outside} {source()}"

    def __call__(self, graph: fx.Graph) -> None:
        """Move the nodes."""
        boundary = next(iter(graph.find_nodes(op="call_function", target=torch.ops.fzero.forward_done.default)), None)
        if boundary is not None:
            if self.stage == 3:
                _gather_again(graph, boundary, self.outside)
            boundary.replace_all_uses_with(boundary.all_input_nodes[0])
            graph.erase_node(boundary)
        order = _Order(graph)
        _place_scatters(order, self.in_flight)
        _place_gathers(order, self.prefetch)
        order.write()


class _Order:
    """The nodes of a graph as a list that can be reordered."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes = list(graph.nodes)
        self.number()

    def number(self) -> None:
        self.place = {node: place for place, node in enumerate(self.nodes)}

    def first(self, nodes: Iterable[fx.Node]) -> int:
        return min((self.place[node] for node in nodes), default=len(self.nodes) - 1)

    def move(self, moved: list[fx.Node], before: fx.Node) -> None:
        """Put nodes, in their order, in front of another one."""
        gone = set(moved)
        kept = [node for node in self.nodes if node not in gone]
        at = kept.index(before)
        self.nodes = [*kept[:at], *moved, *kept[at:]]
        self.number()

    def sink(self, chain: list[fx.Node], limits: Sequence[fx.Node] = ()) -> None:
        """Put a wait and what follows it in front of the first use of them, or of a limit, if that comes first.

        What follows may also stand behind that place: views that backward alone uses stay there.
        """
        users = {user for node in chain for user in node.users} - set(chain)
        target = self.nodes[self.first([*users, *limits])]
        ahead = [node for node in chain if self.place[node] < self.place[target]]
        if ahead:
            self.move(sorted(ahead, key=self.place.__getitem__), target)

    def write(self) -> None:
        """Give the graph this order."""
        for before, node in zip(self.nodes, self.nodes[1:], strict=False):
            before.append(node)
        self.graph.lint()


def _followers(starts: Iterable[fx.Node], follows: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Return nodes and what is computed from them alone, by nodes that `follow`, in order."""
    found = list(starts)
    for node in found:
        found += [
            user
            for user in node.users
            if user not in found
            and follows(user)
            and all(source in found or source.op == "placeholder" for source in user.all_input_nodes)
        ]
    return found


def _wait_of(collective: fx.Node) -> fx.Node | None:
    return next((user for user in collective.users if user.target is _WAIT), None)


def _place_scatters(order: _Order, in_flight: int) -> None:
    """Wait for a scatter only before the launch of the one that would be too many, or where its sum is used."""
    if in_flight == 0:
        return
    scatters = _scatters(order)
    for number, starts in enumerate(scatters):
        waits = [wait for wait in map(_wait_of, starts) if wait is not None]
        chain = _followers(waits, lambda node: _is_view(node) or _is_sum(node))
        limits = [_packing(limit[0]) for limit in scatters[number + in_flight : number + in_flight + 1]]
        order.sink(chain, limits)


def _scatters(order: _Order) -> list[list[fx.Node]]:
    """Return the launches of every scatter: several if its bucket travels in several messages."""
    scatters: dict[fx.Node, list[fx.Node]] = {}
    for start in [node for node in order.nodes if node.target in _SCATTERS]:
        wait = _wait_of(start)
        family = _followers([start] if wait is None else [wait], _is_view)
        total = next((user for node in family for user in node.users if _is_sum(user)), start)
        scatters.setdefault(total, []).append(start)
    return list(scatters.values())


def _is_sum(node: fx.Node) -> bool:
    # what changes its argument is still wrapped in a function that returns it
    return torch.ops.fzero.sum_pieces.default is node.target or torch.ops.fzero.add_pieces.default in node.args


def _packing(start: fx.Node) -> fx.Node:
    """Return the first node of those that pack a scatter's bucket: what comes before it must be freed first."""
    first = node = start
    while True:
        sources = [source for source in node.all_input_nodes if source.op == "call_function"]
        if len(sources) != 1 or node.target is torch.ops.aten.cat.default:
            return first
        node = sources[0]
        if node.target in (torch.ops.aten.cat.default, torch.ops.aten.clone.default):
            first = node
        elif not _is_view(node):
            return first


def _place_gathers(order: _Order, prefetch: int | None) -> None:
    """Wait for a gather where it is first used; launch it when the one `prefetch` places before it is waited for."""
    starts = [node for node in order.nodes if node.target in _GATHERS]
    waits = [_wait_of(start) for start in starts]
    for wait in waits:
        if wait is None:
            continue
        order.sink(_followers([wait], _is_view))
    for number, start in enumerate(starts):
        ready = max((order.place[node] for node in start.all_input_nodes), default=0) + 1
        while order.nodes[ready].op == "placeholder":
            ready += 1
        earliest = ready
        if number:  # collectives keep their order
            earliest = max(earliest, order.place[starts[number - 1]] + 1)
        ahead = None if prefetch is None or number < prefetch else waits[number - prefetch]
        if prefetch is not None and ahead is not None:
            earliest = max(earliest, order.place[ahead])
        target = order.nodes[earliest]
        others = [node for node in order.nodes[earliest : order.place[start]] if _is_collective(node)]
        if others:  # never past another collective than a gather
            target = order.nodes[order.place[others[-1]] + 1]
        if order.place[target] < order.place[start]:
            order.move([start], target)


def _is_collective(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target is _WAIT:  # noqa: SLF001
        return False
    return target.namespace == "_c10d_functional" or target in _GATHERS


def _gather_again(graph: fx.Graph, boundary: fx.Node, outside: int) -> None:
    """Let backward use a gather of its own: a copy of each gather of forward, in front of its first use there."""
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    gathers = [node for node in nodes if node.target in _GATHERS and place[node] < place[boundary]]
    for start in gathers[outside:]:
        wait = _wait_of(start)
        if wait is None:
            continue
        family = [start, *_followers([wait], _is_view)]
        late = [user for node in family for user in node.users if user not in family and place[user] > place[boundary]]
        late += [node for node in family if place[node] > place[boundary]]
        if not late:
            continue
        with graph.inserting_before(min(late, key=place.__getitem__)):
            copies = _copied(graph, family)
        for node in family:
            for user in list(node.users):
                if user not in family and user not in copies.values() and place[user] > place[boundary]:
                    user.replace_input_with(node, copies[node])
    graph.eliminate_dead_code()


def _copied(graph: fx.Graph, nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda source: copies.get(source, source))
    return copies
