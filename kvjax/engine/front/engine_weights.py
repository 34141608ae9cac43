"""What an engine computes with: its model's identity, its weights and their versions.

Flow:    LLMEngine, set_weights -> [EngineWeights] -> WeightsInUse -> tiers, connectors; block hashes have the version

A version names one set of weights, in an engine and in a disk store: KV is looked up by it.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

import jax

import kvjax
from kvjax.device.model.model_weights import ModelWeights, weights_digest
from kvjax.engine.step.config import EngineConfig
from kvjax.models import LoadedModel
from kvjax.models.identity import model_identity, module_identity
from kvjax.models.layers.language_model import LanguageModel
from kvjax.tiers.connector import WeightsInUse


class EngineWeights:
    """The versions of one engine. Digests are computed where somebody asks for them, and at each new version."""

    def __init__(self, model: LoadedModel, config: EngineConfig, shared: ModelWeights | None) -> None:
        """`shared`: weights of compiled steps that another engine made; None: the model's own."""
        self._loaded, self._config, self._shared = model, config, shared
        self._digests: dict[int | str, str] = {}

    @cached_property
    def at_start(self) -> WeightsInUse:
        """The weights that the engine began with."""
        module, shared = self._loaded.module, self._shared
        digest = cache(lambda: weights_digest(module) if shared is None else shared.digest())
        return WeightsInUse(self._model, None, digest)

    @cached_property
    def _model(self) -> dict[str, str]:
        identity = model_identity(self._loaded.config, self._loaded.module)
        return {"code": f"kvjax {kvjax.__version__}", **identity}

    def identity(self) -> dict[str, str]:
        """What units on disk and beyond depend on beside tokens and pages; nothing where there are none."""
        tiers = self._config.tiers
        if tiers is None or not tiers.outlives_engine:
            return {}
        options = dict(self._config.compiler_options or {})
        return {
            **self._model,
            "precision": f"{jax.config.jax_default_matmul_precision}, {sorted(options.items())}",
            "weights": self.at_start.digest() if tiers.weights is None else tiers.weights,
        }

    def of_version(self, version: int | str, weights: ModelWeights, model: Any) -> WeightsInUse:
        """Weights under a version, those of `model`; None: they are in use.

        Raises:
            ValueError: the version is that of other weights, or the model differs by more than weights.
        """
        if isinstance(model, LanguageModel):
            model = model.for_length(self._loaded.config.max_model_len)
        if model is not None and module_identity(model) != module_identity(self._loaded.module):
            raise ValueError(
                "expected a model that differs from the engine's by its weights alone, got one of another "
                "configuration; make a new engine for it"
            )
        digest = weights.digest()
        known = self._digests.get(version, digest)
        if known != digest:
            raise ValueError(
                f"expected a version that names no other weights, got {version!r}, which named weights {known} and is "
                f"given for {digest}; give each update a version of its own"
            )
        return WeightsInUse(self._model, version, lambda: digest)

    def note(self, weights: WeightsInUse) -> None:
        """They are in use from here on."""
        assert weights.version is not None
        self._digests[weights.version] = weights.digest()


__all__ = ["EngineWeights"]
