"""The tables of docs/models.md, from what each step of an architecture's trial found."""

from benchmarks.architectures.page import write_page
from benchmarks.architectures.trial import Outcome

PAGE = """before
<!-- table of cpu -->
old
<!-- end of table -->
between
<!-- table of cuda -->
<!-- end of table -->
after
"""


def test_a_gpu_s_table_has_the_rows_that_differ_from_the_cpu_s(tmp_path):
    """Written again, it is the same; the largest difference that was found is above it."""
    page = tmp_path / "models.md"
    page.write_text(PAGE)
    right, wrong = Outcome("gradient", worst=2e-6), Outcome("packed", "no product", worst=0.5)
    write_page(page, {"a": [right], "b": [right]}, "cpu")
    for _ in range(2):
        write_page(page, {"a": [right], "b": [right, wrong]}, "cuda")
    before, cpu, cuda = page.read_text().split("<!-- table of ")
    assert before == "before\n" and cuda.endswith("<!-- end of table -->\nafter\n")
    assert "| `a` | works |  |\n| `b` | works |  |" in cpu and cpu.endswith("between\n")
    assert "`a`" not in cuda and "| `b` | works | not LoRA on a packed base (no product) |" in cuda
    assert "on CUDA" in cuda and "at most 2e-06" in cuda
