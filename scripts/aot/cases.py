"""Cases that the ahead-of-time compilers take: dataclasses of sizes and features, set by name=value.

Flow:    command line -> [parse_case] -> a case -> scripts/{tpu,gpu}_aot/operations.py -> function, argument shapes
"""

from __future__ import annotations

import dataclasses
from typing import Any


def parse_case(case_type: type, settings: list[str], **defaults: Any) -> Any:
    """A case with some fields set by name=value; `defaults` are those of a `Case`.

    Raises:
        ValueError: a name is none of the case's, or a value is not of its type.
    """
    from pallas_kernels.cases.case import Case, parse  # and jax, which reads the environment

    if issubclass(case_type, Case):
        return parse(case_type, settings, **defaults)
    fields = {field.name: field for field in dataclasses.fields(case_type)}
    values = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in fields:
            raise ValueError(f"expected a setting out of {sorted(fields)}, got {setting!r}")
        values[name] = type(fields[name].default)(text)
    return case_type(**values)
