"""Tests of what an operation refuses, by the argument's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest


def refused_by_name(
    operation: Callable[..., object], given: Mapping[str, Any], cases: Mapping[str, tuple[Mapping[str, Any], str]]
) -> Callable[[str], None]:
    """A test that `operation` takes none of `cases`.

    given  arguments that it would take
    cases  name -> (what is given otherwise, what the ValueError must match)
    """

    @pytest.mark.parametrize("case", cases)
    def test(case: str) -> None:
        changes, message = cases[case]
        with pytest.raises(ValueError, match=message):
            operation(**{**given, **changes})

    return test
