"""One HTML file that shows a model, its streams and their simulated run. It loads nothing from anywhere.

render(build.page(flat, costs))
"""

from msplit.report.html.page import Page, render

__all__ = ["Page", "render"]
