"""`torch.compile(model, backend="relaxlite")`: what became of its graphs.

import relaxlite.torch
fast = torch.compile(model, backend="relaxlite", dynamic=True)
with torch.no_grad():
    fast(x)
print(relaxlite.torch.report())      # compiled graphs, and what runs in eager and why
"""

from __future__ import annotations

from relaxlite.torch.report import GraphReport, Report, report, reset_report

__all__ = ["GraphReport", "Report", "report", "reset_report"]
