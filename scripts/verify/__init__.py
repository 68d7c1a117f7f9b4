"""The checks behind `scripts/verify.py`: each repeats one promise of the product over many random cases.

Rules: a case is a function of its seed alone, so that one failing case is one command; a check states how many cases it
was asked for and how many it ran; a check must be able to fail, which `seeded_faults` shows. A kernel, a phase or a
check that is written later is verified by being listed.
"""
