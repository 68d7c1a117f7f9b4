"""`bucketgraph report`: what became of calls, which buckets earn their keep, and which sizes would do better.

    statistics ──source──▶ phases ──drift, proposal──▶ report ──table, page──▶ a terminal, JSON, one HTML file
                          (phase.py)                 (build.py)

Rules: no file here imports torch; the planner chooses the sizes and measures the waste, nothing here does; nothing is
written before everything is known. The package is not named `report`, since `bucketgraph.report` is the function.
"""
