"""Points a captured graph at other memory, by setting its nodes' parameters instead of capturing anew.

    rebinder = Rebinder(graph, second, Moved.of("x", at_a, at_b), lock=family.lock)
    rebinder.verify("x", ...)                        # once, on poisoned memory
    rebinder.run({"x": now}, captured.replay)        # each call: what changed is set, then one launch

Rules: a driver cannot be asked what an executable holds, so what was last set is kept here, and this must be the only
one to update it. Updates hold for later launches and never for one that is enqueued: nothing is waited for. Graphs are
not thread-safe, so updates and launches share one lock. A failed update leaves everything as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from bucketgraph.cuda.driver import DriverError
from bucketgraph.cuda.graph import Graph
from bucketgraph.cuda.memory import Region
from bucketgraph.cuda.shadow import Shadow
from bucketgraph.cuda.sites import Moved, Proof, Site, described, prove
from bucketgraph.cuda.verify import Check, on_poison
from bucketgraph.errors import BucketGraphError, InputError

T = TypeVar("T")


class RebindError(BucketGraphError, RuntimeError):
    """A tensor cannot be bound to this address, or to any; the graph reads what it read before, and nothing ran."""


@dataclass
class _Bound:
    proof: Proof
    address: int  # where the executable reads the tensor now
    verified: bool = False
    writes: tuple[tuple[Shadow, int, int], ...] = ()  # the node, the offset in its block, bytes from the tensor's start
    alignments: tuple[tuple[int, int, Site], ...] = ()  # an address divided by the first must leave the second


class Rebinder:
    """Rebinds tensors of one captured graph; from threads in which torch has used the graph's device before.

    Args:
        graph: the first capture, instantiated; with the tensors at their first places.
        second: the same function captured with the tensors at their second places; only looked at.
        moved: the tensors that moved between the two.
        lock: held during updates and launches; the family's, where graphs share a pool.

    Raises:
        CaptureError: the first capture was not instantiated.
        InputError: a tensor is named twice.
    """

    def __init__(
        self, graph: Graph, second: Graph, *moved: Moved, lock: AbstractContextManager[Any] | None = None
    ) -> None:
        self._graph = graph
        self._driver = graph.driver
        self._executable = graph.executable()
        self._lock = lock or threading.RLock()
        self._bound: dict[str, _Bound] = {}
        self._shadows: dict[int, Shadow] = {}
        self._broken: str | None = None
        self.add(second, *moved)

    def add(self, second: Graph, *moved: Moved) -> None:
        """Prove more tensors, by another second capture. Their fate and that of earlier ones are independent."""
        if named := [each.name for each in moved if each.name in self._bound]:
            raise InputError("already proved", given=", ".join(named))
        with self._lock:
            for proof in prove(self._graph, second, *moved):
                refusal = proof.refusal or self._clash(proof.moved) or self._refused_by_driver(proof)
                self._bound[proof.moved.name] = bound = _Bound(
                    replace(proof, refusal=refusal), proof.moved.first.address
                )
                sites = proof.sites if refusal is None else ()
                bound.writes = self._writes(sites)
                rests = {(site.alignment, -site.inside % site.alignment): site for site in reversed(sites)}
                bound.alignments = tuple((*key, site) for key, site in rests.items())

    def _clash(self, moved: Moved) -> str | None:
        for name, other in self._bound.items():
            if other.proof.moved.first.overlaps(moved.first):
                return f"it overlaps {name}, so an address may be of either"
        return None

    def _refused_by_driver(self, proof: Proof) -> str | None:
        """Set every node of the proof to what it has already: what cannot be updated at all says so now."""
        for index in sorted({site.node for site in proof.sites}):
            try:
                self._shadow(index).set()
            except DriverError as error:
                return f"{described(self._graph.nodes[index])}: {error}"
        return None

    def _shadow(self, index: int) -> Shadow:
        if index not in self._shadows:
            self._shadows[index] = Shadow(self._graph.nodes[index], self._driver, self._executable)
        return self._shadows[index]

    def _writes(self, sites: tuple[Site, ...]) -> tuple[tuple[Shadow, int, int], ...]:
        return tuple((self._shadow(site.node), site.offset, site.inside) for site in sites)

    def refusal(self, name: str) -> str | None:
        """Why a tensor cannot be rebound; None if it can."""
        return self._named(name).proof.refusal

    def doubt(self, name: str) -> str | None:
        """Why a tensor can be rebound only after `verify` or `trust`; None if there is nothing to be shown any more."""
        bound = self._named(name)
        return None if bound.verified else bound.proof.doubt

    def trust(self, name: str) -> None:
        """The caller verifies a tensor in a way of its own, and refuses it if that fails."""
        self._named(name).verified = True

    def refuse(self, name: str, reason: str) -> None:
        """A tensor is not to be rebound from now on, for a reason that no node shows."""
        bound = self._named(name)
        bound.proof = replace(bound.proof, refusal=reason)

    def sites(self, name: str) -> tuple[Site, ...]:
        """Where the graph's nodes hold a tensor's address."""
        return self._named(name).proof.sites

    def address(self, name: str) -> int:
        """Where the graph reads a tensor now."""
        return self._named(name).address

    def rebind(self, name: str, new: Tensor | int) -> None:
        """From the next launch on, the graph uses the tensor at another place.

        Args:
            name: a tensor that moved between the captures.
            new: a tensor of the same shape, strides and dtype, or the address of one; kept alive by the caller until
                the last launch that uses it has ended.

        Raises:
            RebindError: the tensor was refused, the address breaks the alignment, or the driver refused.
            InputError: there is no such tensor, or the new one has another size.
        """
        with self._lock:
            self._apply({name: new})

    def run(self, new: Mapping[str, Tensor | int], replay: Callable[[], T]) -> T:
        """Rebind all of these or none, then replay, with no other update in between. Raises as `rebind` does."""
        with self._lock:
            self._apply(new)
            return replay()

    def launch(self, new: Mapping[str, Tensor | int], stream: int) -> None:
        """As `run`, launching on a stream (CUstream) without torch, whose random generators stay as they are."""
        self.run(new, lambda: self._driver.launch(self._executable, stream))

    def verify(self, name: str, new: Tensor | int, check: Check[T]) -> str | None:
        """Replay on another place with the old ones poisoned, once; then bind the tensor back.

        Returns:
            None if the results were right; else the reason, for which the tensor is refused from now on. Raises as
            `rebind` does.
        """
        with self._lock:
            bound = self._named(name)
            was = bound.address
            held, bound.verified = bound.verified, True
            try:
                reason = on_poison(check, lambda: self._apply({name: new}), lambda: self._apply({name: was}))
            except BaseException:
                bound.verified = held
                raise
            bound.verified = reason is None
            if reason is not None:
                bound.proof = replace(bound.proof, refusal=reason)
            return reason

    def renew(self) -> None:
        """After torch instantiated the graph anew: take the new executable and set in it what was bound."""
        with self._lock:
            self._executable, self._broken = self._graph.executable(), None
            kept = {name: bound for name, bound in self._bound.items() if bound.proof.refusal is None}
            now = {n: each.address for n, each in kept.items() if each.address != each.proof.moved.first.address}
            self._shadows.clear()
            for bound in self._bound.values():
                bound.address = bound.proof.moved.first.address
                bound.writes = self._writes(bound.proof.sites if bound.proof.refusal is None else ())
            self._apply(now)

    def explain(self) -> list[str]:
        """A line for each tensor and each of its sites, or the reason why it cannot be rebound."""
        lines = []
        for name, bound in self._bound.items():
            if bound.proof.refusal is not None:
                lines.append(f"{name}: refused: {bound.proof.refusal}")
                continue
            count = len(bound.proof.sites)
            checked = "verified on poisoned memory" if bound.verified else "not verified"
            lines.append(f"{name}: {count} site{'s' * (count != 1)}, at 0x{bound.address:x}, {checked}")
            if (doubt := self.doubt(name)) is not None:
                lines.append(f"  to be verified before it moves: {doubt}")
            for site in bound.proof.sites:
                node = described(self._graph.nodes[site.node])
                where = f"parameter {site.parameter}, byte {site.offset} of its block"
                lines.append(f"  {node}, {where}: {name} + {site.inside}, divisible by {site.alignment}")
        return lines

    def _named(self, name: str) -> _Bound:
        if name not in self._bound:
            raise InputError("no such tensor was proved", given=name, expected=", ".join(self._bound))
        return self._bound[name]

    def _apply(self, new: Mapping[str, Tensor | int]) -> None:
        """Set all of these addresses, or none of them. The lock must be held."""
        if self._broken is not None:
            raise RebindError("the executable is in an unknown state", given=self._broken, hint="instantiate anew")
        was = {name: self._named(name).address for name in new}
        now = {name: self._checked(name, place) for name, place in new.items()}
        moves = {name: address for name, address in now.items() if address != was[name]}
        done: list[Shadow] = []
        try:
            for shadow in self._written(moves):
                done.append(shadow)
                shadow.set()
        except DriverError as error:
            self._take_back(done, {name: was[name] for name in moves})
            raise RebindError(f"cannot rebind {', '.join(moves)}", given=str(error)) from error
        for name, address in moves.items():
            self._bound[name].address = address

    def _take_back(self, done: list[Shadow], was: Mapping[str, int]) -> None:
        self._written(was)
        try:
            for shadow in done:
                shadow.set()
        except DriverError as error:
            self._broken = str(error)

    def _written(self, addresses: Mapping[str, int]) -> list[Shadow]:
        """The shadows of the nodes that hold these tensors, with the addresses written into their bytes."""
        changed: dict[Shadow, None] = {}
        for name, address in addresses.items():
            for shadow, offset, inside in self._bound[name].writes:
                shadow.write(offset, address + inside)
                changed[shadow] = None
        return list(changed)

    def _checked(self, name: str, new: Tensor | int) -> int:
        bound = self._bound[name]
        proof = bound.proof
        if proof.refusal is not None:
            raise RebindError(f"{name} cannot be rebound", given=proof.refusal)
        if proof.doubt is not None and not bound.verified:
            raise RebindError(f"{name} cannot be rebound before it is verified", given=proof.doubt)
        size = proof.moved.first.size
        region = Region.of(name, new) if isinstance(new, Tensor) else Region(name, new, size)
        if region.size != size:
            raise InputError(f"{name} has another size", given=f"{region.size} bytes", expected=f"{size} bytes")
        for alignment, rest, site in bound.alignments:
            if region.address <= 0 or region.address % alignment != rest:
                node = described(self._graph.nodes[site.node])
                raise RebindError(
                    f"{name} is not aligned for {node}",
                    given=f"0x{region.address:x}",
                    expected=f"a multiple of {site.alignment} bytes"
                    + (f", less {site.inside}" if site.inside % site.alignment else ""),
                    hint="its code was chosen for that: copy instead",
                )
        return region.address
