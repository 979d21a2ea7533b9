"""One HTML file that shows a model, its streams and their simulated run. It loads nothing from anywhere.

render(build.page(flat, costs))
"""

from msplit.report.html.page import Candidate, Finding, Page, render

__all__ = ["Candidate", "Finding", "Page", "render"]
