"""Folders of the user's files."""

from __future__ import annotations

import pytest

from mlxrunner.system.folders import data_folder


def test_the_home_of_an_unknown_user_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Callers make one line of an OSError."""
    monkeypatch.setenv("MLXRUNNER_DATA", "~no-such-user/data")
    with pytest.raises(OSError, match="MLXRUNNER_DATA names ~no-such-user/data"):
        data_folder()
