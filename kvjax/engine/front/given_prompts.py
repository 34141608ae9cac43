"""What a caller gives for prompts and their params, told apart from what looks like it.

Flow:    LLMEngine.generate, stream -> [prompts_of, params_of] -> RequestMaker -> [encoded] -> token ids
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.core.tables.given_values import as_text
from kvjax.engine.requests.sampling_params import SamplingParams, checked_params
from kvjax.models import LoadedModel

FORMS = "a text, a list of token ids or an integer array"


def prompts_of(prompts: Any) -> Sequence[Any]:
    """The prompts; a text is one.

    Raises:
        ValueError: they are no prompts, or one prompt's token ids.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise ValueError(f"expected a list of prompts, each {FORMS}, got {_named(prompts)}")
    given = list(prompts)
    if any(isinstance(one, int | np.integer) for one in given):
        raise ValueError("expected a list of prompts, got the token ids of one: put them in a list, [token_ids]")
    return given


def check_prompt(prompt: Any) -> None:
    """Raises ValueError where one prompt is neither a text nor a row of anything."""
    if isinstance(prompt, Mapping | bytes) or not isinstance(prompt, Iterable):
        raise ValueError(f"expected a prompt as {FORMS}, got {_named(prompt)}")


def encoded(model: LoadedModel, prompt: Any) -> Sequence[int] | np.ndarray:
    """One prompt's token ids, as far as they are known to be such: a text's by the model's tokenizer.

    Raises:
        ValueError: it is no prompt, or text for a model without a tokenizer.
    """
    if not isinstance(prompt, str):
        check_prompt(prompt)
        return prompt  # type: ignore[no-any-return]
    as_text("a prompt", prompt)
    if model.tokenizer is None:
        raise ValueError(f"expected token ids, got text: {model.no_tokenizer}")
    return model.tokenizer.encode(prompt)


def params_of(params: Any, num_prompts: int) -> list[SamplingParams]:
    """One `params` for each prompt.

    Raises:
        ValueError: there are more or fewer, or one is of another type.
    """
    each = list(params) if isinstance(params, Sequence) else [params] * num_prompts
    if len(each) != num_prompts:
        raise ValueError(f"expected one params or {num_prompts}, got {len(each)}")
    return [checked_params(one) for one in each]


def _named(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


__all__ = ["check_prompt", "encoded", "params_of", "prompts_of"]
