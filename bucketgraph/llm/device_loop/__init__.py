"""Decoding without the CPU: one launch generates tokens for a batch until its rows are done, and the host reads along.

Rules: a run stays in the bucket that the host loop would use, and ends where that would take a smaller one, so both
loops choose equal tokens. Pages and block tables are fixed for the run. Tokens come through a ring that is as long as
a run may be: a late reader loses none. The host may drop a row, or halt the run, which takes effect within two steps.
While a run is in flight nobody else may fill this family's inputs: the engine ends it first. What cannot run here runs
on the host loop, for a reason that is counted.
"""

from bucketgraph.llm.device_loop.build import LoopReport
from bucketgraph.llm.device_loop.loops import DeviceLoops
from bucketgraph.llm.device_loop.run import PAUSE, Run

__all__ = ["PAUSE", "DeviceLoops", "LoopReport", "Run"]
