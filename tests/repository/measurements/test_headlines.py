"""The first page's figures: filled from results, and never out of nothing."""

from benchmarks.harness import headlines, record


def test_every_line_is_of_a_figure_that_its_benchmark_has():
    """Each line of the real page can be made from the committed results, and says one of their numbers."""
    found = headlines.headlines(record.RESULTS)
    assert found.count("\n- ") + 1 == len(headlines.LINES)
    assert all(f"benchmarks.{name}" in found for name, _, _ in headlines.LINES)
    assert all(len(line) <= 118 and line.count("`") % 2 == 0 for line in found.split("\n"))
