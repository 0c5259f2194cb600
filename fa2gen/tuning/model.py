"""The performance models, one for each kind and family of kernels, behind one call."""

from __future__ import annotations

from fa2gen.hardware import Gpu, get_gpu
from fa2gen.problem import Problem
from fa2gen.spec import BwdConfig, Config, FwdSm90Config, KernelSpec

from . import model_backward, model_forward, model_sm90
from .prediction import Facts, Prediction

CALIBRATED_ON = {("fwd", "sm80"): "h200", ("fwd", "sm90"): "h200", ("bwd", "sm80"): "h200"}
"""The product whose measured times the constants of a kind and family are fitted to and judged by."""

_VERSIONS = {
    ("fwd", "sm80"): model_forward.MODEL_VERSION,
    ("fwd", "sm90"): model_sm90.MODEL_VERSION,
    ("bwd", "sm80"): model_backward.MODEL_VERSION,
}


def model_version(kind: str, family: str) -> str:
    """Version of the model that predicts a kind and family of kernels; another version gives other numbers."""
    return _VERSIONS[kind, family]


def validity(gpu: Gpu, kind: str, family: str) -> str:
    """What is known of the truth of a model on a chip."""
    chip = CALIBRATED_ON[kind, family]
    if gpu.name == chip:
        return "calibrated on this chip"
    return f"calibrated on an {get_gpu(chip).title}; its transfer to the {gpu.title} is unvalidated"


def estimate_facts(spec: KernelSpec, config: Config, gpu: Gpu) -> Facts:
    """Facts before compiling."""
    if isinstance(config, BwdConfig):
        return model_backward.estimate_facts(spec, config, gpu)
    if isinstance(config, FwdSm90Config):
        return model_sm90.estimate_facts(spec, config)
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
    if isinstance(config, FwdSm90Config):
        return model_sm90.predict(spec, config, problem, gpu, facts)
    return model_forward.predict(spec, config, problem, gpu, facts)
