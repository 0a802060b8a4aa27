"""What measurements share: clocks, models and their work, records, tables, charts. It measures nothing."""
