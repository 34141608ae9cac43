"""Every value of every setting that transformers has is computed as it computes it, or refused by its name.

What is kept of transformers, scripts/goldens/setting_goldens.py says. One value in many is run here, the others are a
sweep.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvjax.engine import EngineConfig
from kvjax.models import load_model
from scripts.goldens.setting_cases import drawn_features
from scripts.goldens.setting_goldens import ARCHITECTURES, UNTOUCHED, Case, cases_of
from tests.models.families import ATOL, RecordingEngine, drain, greedy_params

FORMS = json.loads((Path(__file__).parents[1] / "config_forms.json").read_text(encoding="utf-8"))
CONFIG = EngineConfig(
    block_size=16,
    num_blocks=64,
    max_model_len=64,
    max_num_seqs=2,
    max_num_batched_tokens=16,  # so that the prompt comes in three chunks
    max_buckets=1,
    enable_prefix_caching=False,
)
CASES = [case for name in ARCHITECTURES for case in cases_of(name) if case.account == "case"]


def marks(case: Case) -> list[pytest.MarkDecorator]:
    """All are a sweep but the one with ties among entries that no head likes."""
    return [] if case.change.get("index_n_heads") == 3 else [pytest.mark.sweep]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_setting_is_accounted_for(architecture: str) -> None:
    """There is a golden, a refusal or transformers' own word for it of each value that was tried."""
    normal = FORMS[architecture]["normal"]
    keys = {case.key for case in cases_of(architecture)}
    assert set(normal.get("text_config", normal)) - keys <= UNTOUCHED
    missing = [(case.id, case.change, case.config) for case in cases_of(architecture) if case.account == "missing"]
    assert missing == []


def test_all_families_have_goldens() -> None:
    """Architectures around a text model read the same keys, and config_forms.json holds what stands beside them."""
    assert {name for name, form in FORMS.items() if "text_config" not in form["normal"]} <= set(ARCHITECTURES)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id, marks=marks(case)) for case in CASES])
def test_a_value_computes_what_transformers_computes(case: Case, tmp_path: Path) -> None:
    """A prompt in chunks, then single tokens."""
    assert case.logits is not None
    case.save(tmp_path)
    model = load_model(tmp_path, "float32")
    engine = RecordingEngine(model, CONFIG)
    features = next(iter(model.config.encoder_shapes), None)
    request_id = engine.add_request(
        case.prompt,
        greedy_params(len(case.logits)),
        encoder_features=None if features is None else drawn_features(*features),
    )
    result = drain(engine)[request_id]
    assert result.output_token_ids.tolist() == case.logits.argmax(-1).tolist()
    np.testing.assert_allclose(np.stack(engine.logits[request_id]), case.logits, atol=ATOL, rtol=0)
