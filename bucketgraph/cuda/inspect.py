"""A graph for people: what runs how often, grouped by kernel, and a picture for Graphviz."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table
from torch import Tensor

from bucketgraph.cuda.graph import Graph
from bucketgraph.cuda.memory import Pointer
from bucketgraph.cuda.nodes import KernelNode, MemcpyNode, MemsetNode, Node

_MOST = 4  # values of one kind shown in a cell
# Fill colours of Graphviz, by library; the rest stay white.
_COLOURS = {
    "bucketgraph": "palegreen",
    "Triton": "darkseagreen1",
    "cuBLAS": "lightskyblue",
    "CUTLASS": "lightblue",
    "cuDNN": "plum",
    "FlashAttention": "gold",
    "ATen": "mistyrose",
}


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that run the same kernel, or that are copies or fills of the same sort."""

    library: str
    label: str
    nodes: tuple[Node, ...]
    tensors: tuple[str, ...]  # known tensors that they point into

    @property
    def parameter_bytes(self) -> tuple[int, ...]:
        """Sizes of the nodes' parameter blocks, each once."""
        return tuple(sorted({len(node.block) for node in self.nodes}))


def groups(graph: Graph, tensors: Mapping[str, Tensor] | None = None) -> tuple[Group, ...]:
    """All nodes, grouped; the largest groups first. `tensors` are known by name, to say what nodes point into."""
    pointed: dict[int, list[Pointer]] = {}
    for pointer in graph.pointers(tensors or {}):
        pointed.setdefault(pointer.node, []).append(pointer)
    found: dict[tuple[str, str], list[Node]] = {}
    for node in graph.nodes:
        found.setdefault((node.library, node.label), []).append(node)
    made = []
    for (library, label), nodes in found.items():
        names = dict.fromkeys(pointer.tensor for node in nodes for pointer in pointed.get(node.index, ()))
        made.append(Group(library, label, tuple(nodes), tuple(names)))
    return tuple(sorted(made, key=lambda group: -len(group.nodes)))


def table(found: Sequence[Group], title: str) -> Table:
    """One row for each group."""
    count = sum(len(group.nodes) for group in found)
    made = Table(title=escape(f"{title}: {count} nodes"), title_justify="left", header_style="bold", pad_edge=False)
    for column in ("library", "kernel", "count", "grid", "block", "shared", "parameters", "points into"):
        made.add_column(column, justify="right" if column in ("count", "shared", "parameters") else "left")
    for group in found:
        kernels = [node for node in group.nodes if isinstance(node, KernelNode)]
        made.add_row(
            escape(group.library),
            escape(group.label),
            str(len(group.nodes)),
            _listed(_size(node) for node in group.nodes),
            _listed(_dims(node.params.block) for node in kernels),
            _listed(f"{node.params.shared_bytes} B" for node in kernels),
            _listed(f"{size} B" for size in group.parameter_bytes),
            _listed(group.tensors),
        )
    return made


def by_library(found: Iterable[Group]) -> dict[str, int]:
    """Nodes of each library, the most frequent first."""
    counts: Counter[str] = Counter()
    for group in found:
        counts[group.library] += len(group.nodes)
    return dict(counts.most_common())


def _size(node: Node) -> str:
    if isinstance(node, KernelNode):
        return _dims(node.params.grid)
    return f"{node.size} B" if isinstance(node, MemcpyNode | MemsetNode) else ""


def _dims(dims: tuple[int, int, int]) -> str:
    return "x".join(map(str, dims if dims[2] > 1 else dims[:2] if dims[1] > 1 else dims[:1]))


def _listed(items: Iterable[str]) -> str:
    once = list(dict.fromkeys(items))
    more = f" and {len(once) - _MOST} more" if len(once) > _MOST else ""
    return escape(", ".join(once[:_MOST]) + more)


def dot(graph: Graph, name: str, tensors: Mapping[str, Tensor] | None = None) -> str:
    """The graph in Graphviz's language. A dashed arrow is a programmatic dependency, which may start early."""
    pointed: dict[int, list[str]] = {}
    for pointer in graph.pointers(tensors or {}):
        pointed.setdefault(pointer.node, []).append(pointer.tensor)
    lines = [f"digraph {_quoted(name)} {{", '  node [shape=box, style=filled, fontname="Helvetica"];']
    for node in graph.nodes:
        parts = [f"{node.index}: {node.label}", " ".join((node.library, _size(node))).strip()]
        parts += [", ".join(dict.fromkeys(pointed[node.index]))] if node.index in pointed else []
        full = node.name if isinstance(node, KernelNode) else node.kind
        colour = _COLOURS.get(node.library, "white")
        label = "\\n".join(_escaped(part) for part in parts)
        lines.append(f'  n{node.index} [label="{label}", tooltip={_quoted(full)}, fillcolor={colour}];')
    for node in graph.nodes:
        for before in node.after:
            style = " [style=dashed]" if before.programmatic else ""
            lines.append(f"  n{before.node} -> n{node.index}{style};")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    """For a quoted string of Graphviz, where a backslash starts an escape such as the line break `\\n`."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
