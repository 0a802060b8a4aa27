"""Opening a report in a browser's tab, and whether it behaved."""

WAIT = 600_000  # ms: for what hangs


def opened(tab, path, part="overview"):
    """Opens a file at one of its parts."""
    tab.goto(f"{path.as_uri()}#{part}")
    tab.wait_for_selector("html[data-ready]", timeout=WAIT)
    if part in ("completions", "problems"):
        tab.wait_for_selector(f"#{part}[data-ready]", timeout=WAIT)


def quiet(tab):
    """Whether the page had no fault and asked for nothing but itself."""
    outside = [each for each in tab.asked if not each.startswith(("file:", "data:"))]
    return tab.problems == [] and outside == []
