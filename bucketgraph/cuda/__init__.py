"""CUDA graphs as data: what is in a captured graph, and how to point it at other memory without capturing anew.

`Graph.of` reads the nodes of a graph that torch captured; `inspect` groups and draws them. `prove` finds where a graph
holds a tensor's address by comparing two captures, and `Rebinder` writes another address there before a launch.
Everything needs the package cuda-bindings and a GPU, and is imported by nothing that runs without them.
"""

from bucketgraph.cuda.driver import Driver, DriverError, load_driver
from bucketgraph.cuda.graph import Graph
from bucketgraph.cuda.rebind import Rebinder, RebindError
from bucketgraph.cuda.sites import Moved, Proof, Site, prove
from bucketgraph.cuda.verify import Check

__all__ = [
    "Check",
    "Driver",
    "DriverError",
    "Graph",
    "Moved",
    "Proof",
    "RebindError",
    "Rebinder",
    "Site",
    "load_driver",
    "prove",
]
