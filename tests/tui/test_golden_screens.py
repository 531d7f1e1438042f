"""Three screens, text for text: whatever moves, is cut or is worded otherwise shows. Another one that was meant is kept
by `python -m tests.tools.golden_screens`."""

from __future__ import annotations

import pytest

from tests.tools import golden_screens


@pytest.mark.parametrize("name", golden_screens.SCREENS)
def test_it_looks_as_it_did(name, own_cache, no_own_models):
    shown = golden_screens.SCREENS[name]() + "\n"
    assert shown == golden_screens.kept(name).read_text("utf-8"), (
        f"{name} looks otherwise. If that was meant: `python -m tests.tools.golden_screens` keeps it.\n{shown}"
    )
