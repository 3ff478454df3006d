"""A report of a run opens in a browser without errors, asks no network, and fits a phone."""

from __future__ import annotations

from mpizero.cli.main import main
from tests.train.report.conftest import eventful  # noqa: F401 - a fixture


def test_a_report_opens_without_errors_and_fits_screens_of_all_widths(eventful, browser, tmp_path):  # noqa: F811
    page = tmp_path / "report.html"
    assert main(["report", str(eventful), "-o", str(page)]) == 0
    assert not browser.faults(page)
