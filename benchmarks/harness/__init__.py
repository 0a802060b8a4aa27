"""What the measurements share: clocks, models and their work, records, tables, charts; it measures nothing."""
