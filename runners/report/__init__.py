"""A run to look at: a reader of its files that makes one HTML page, or serves it while the run goes on.

Nothing here imports MLX, and nothing here changes a run: it reads files that `runners.telemetry` writes.
"""

from runners.report.at_end import final_report
from runners.report.page import Written, write_report
from runners.report.run_record import RunRecord

__all__ = ["RunRecord", "Written", "final_report", "write_report"]
