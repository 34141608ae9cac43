"""Colours that mean something differ from one another, also in grey where one lies on another."""

from __future__ import annotations

from itertools import combinations

import pytest

from kvjax.cli.pictures import colors

MEANINGS = {name: getattr(colors, name) for name in colors.__all__ if name not in ("COMPARED", "MARKERS")}


def lightness(color: str) -> float:
    """Of a colour in the sRGB space, 0 to 1, by the weights of ITU-R BT.709."""
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def distance(one: str, other: str) -> float:
    """In the cube of red, green and blue, whose edges are 1."""
    parts = [(int(one[i : i + 2], 16) - int(other[i : i + 2], 16)) / 255 for i in (1, 3, 5)]
    return sum(part * part for part in parts) ** 0.5


def test_no_colour_means_two_things() -> None:
    for (name, one), (other_name, other) in combinations(MEANINGS.items(), 2):
        assert distance(one, other) > 0.15, f"{name} and {other_name}"


def test_what_is_compared_has_a_colour_and_a_marker_of_its_own() -> None:
    assert len(set(colors.COMPARED)) == len(set(colors.MARKERS)) == len(colors.COMPARED) == len(colors.MARKERS)
    for one, other in combinations((*colors.COMPARED, colors.BOUND), 2):
        assert distance(one, other) > 0.15


@pytest.mark.parametrize(("one", "other"), [("HELD", "CACHED"), ("CACHED", "EMPTY"), ("HIT", "MISSED")])
def test_areas_that_touch_differ_in_grey(one: str, other: str) -> None:
    assert abs(lightness(MEANINGS[one]) - lightness(MEANINGS[other])) > 0.2
