"""Tuning: from a spec and a size to the fastest config, measured on the GPU or predicted for one that is not there.

``session.tune`` is the entry point. Importing this package imports neither torch nor Optuna nor PyCUDA.
"""
