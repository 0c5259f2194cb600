"""Errors cross from one process to another, where a pool's worker raises them."""

from __future__ import annotations

import pickle

import pytest

from fa2gen import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.EmulatorError("deadlock", "nobody can go on"),
        errors.CompileError("nvcc refused it", "the log"),
        errors.UnsupportedError("head_dim 264 is not supported"),
    ],
)
def test_errors_survive_pickling(error: errors.Fa2genError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_an_emulator_error_reads_as_name_and_message() -> None:
    assert str(errors.EmulatorError("deadlock", "nobody can go on")) == "deadlock: nobody can go on"
