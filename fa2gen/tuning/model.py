"""The performance models, one for each kind of kernel, behind one call."""

from __future__ import annotations

from fa2gen.hardware import Gpu, get_gpu
from fa2gen.problem import Problem
from fa2gen.spec import BwdConfig, Config, KernelSpec

from . import model_backward, model_forward
from .prediction import Facts, Prediction

CALIBRATED_ON = {"fwd": "h200", "bwd": "h200"}
"""The product whose measured times a kind's constants are fitted to and judged by."""

_VERSIONS = {"fwd": model_forward.MODEL_VERSION, "bwd": model_backward.MODEL_VERSION}


def model_version(kind: str) -> str:
    """Version of the model that predicts a kind of kernel; another version gives other numbers."""
    return _VERSIONS[kind]


def validity(gpu: Gpu, kind: str) -> str:
    """What is known of the truth of a kind's model on a chip."""
    chip = CALIBRATED_ON[kind]
    if gpu.name == chip:
        return "calibrated on this chip"
    return f"calibrated on an {get_gpu(chip).title}; its transfer to the {gpu.title} is unvalidated"


def estimate_facts(spec: KernelSpec, config: Config, gpu: Gpu) -> Facts:
    """Facts before compiling."""
    if isinstance(config, BwdConfig):
        return model_backward.estimate_facts(spec, config, gpu)
    return model_forward.estimate_facts(spec, config, gpu)


def predict(spec: KernelSpec, config: Config, problem: Problem, gpu: Gpu, facts: Facts | None = None) -> Prediction:
    """Time of a call: of the forward's kernel, or of the backward's three.

    Args:
        spec, config, problem, gpu: What runs where.
        facts: From the compiled kernel; estimated if None.
    """
    facts = facts or estimate_facts(spec, config, gpu)
    if isinstance(config, BwdConfig):
        return model_backward.predict(spec, config, problem, gpu, facts)
    return model_forward.predict(spec, config, problem, gpu, facts)
