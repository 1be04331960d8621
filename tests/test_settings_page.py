"""docs/settings.md has every setting as the code has it."""

from scripts.settings_page import PAGE, settings_page


def test_the_page_is_what_the_settings_generate() -> None:
    assert PAGE.read_text() == settings_page(), "run python scripts/settings_page.py"
