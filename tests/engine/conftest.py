"""For tests that make many runners of one model."""

from __future__ import annotations

from typing import Any

import pytest
from support.histories import Parts, tiny_parts

from mlxrunner.cache.layers.factory import CacheOptions
from mlxrunner.engine.backends import proof
from mlxrunner.engine.backends.backend import BatchingMode
from mlxrunner.engine.backends.batched import BatchedModel
from mlxrunner.testing import OracleModel


@pytest.fixture(scope="session")
def proofs() -> dict[Any, Any]:
    """Return what each proof found, with its model, which keeps its number."""
    return {}


@pytest.fixture
def proved_once(proofs: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove once in this process how requests may share a model, not for each runner of it.

    The proof takes a third of the time of a short history. tests/engine/test_architectures.py
    runs it each time.
    """

    class ProvedOnce(proof.Proof):
        def __init__(self, model: Any, options: CacheOptions, far: tuple[int, ...]) -> None:
            self._given = model, options, far
            same = tuple(model.kinds) if type(model) is OracleModel else id(model)
            _, self._found = proofs.setdefault((same, options, far), (model, {}))

        def difference(self, adapted: BatchedModel) -> str | None:
            mode: BatchingMode = adapted.mode
            if mode not in self._found:
                if not hasattr(self, "_expected"):
                    super().__init__(*self._given)
                self._found[mode] = super().difference(adapted)
            elif self._found[mode] is None:
                adapted.wrap()
            return self._found[mode]

    monkeypatch.setattr(proof, "Proof", ProvedOnce)


@pytest.fixture(scope="session")
def llama() -> Parts:
    return tiny_parts("llama")
