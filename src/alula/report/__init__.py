"""One self-contained HTML page that compares runs."""

from alula.report.page import write_report

__all__ = ["write_report"]
