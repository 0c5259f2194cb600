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


@pytest.mark.parametrize(
    ("message", "log", "text"),
    [
        ("nvcc 13.0.88 failed: fatal : boom", "  fatal : boom\n", "nvcc 13.0.88 failed: fatal : boom"),
        ("nvcc failed: a error: b", "note c\n\na error: b \n  d\n", "nvcc failed: a error: b\nnote c\n  d"),
        ("nvcc failed: b", "ab", "nvcc failed: b\nab"),
        ("nvcc failed: no output", "", "nvcc failed: no output"),
    ],
)
def test_a_compilers_words_are_said_once(message: str, log: str, text: str) -> None:
    assert errors.CompileError(message, log).full_text == text
