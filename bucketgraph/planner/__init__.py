"""Bucket sizes from what was really asked: a trace of request lengths in, a bucket set and its trade-offs out.

    trace ──read──▶ demand ──optimum──▶ buckets ──write──▶ a set that `load` takes
    (traces.py)   (demand.py)   ▲      (choose.py)        (document.py)
                           cost curve (costs.py, roofline.py, calibrate.py)

Rules: no file here imports torch but `calibrate.py`, which runs a model; nothing is written before everything is known.
"""
