"""Pages, messages and docstrings are free of the listed phrases; the list finds them, and only them."""

import pytest

from tests import plain_english

DIALECT = {
    "These groups teach nothing.": "teach nothing",
    "It rises when an epoch too many is learned by heart.": "by heart",
    "The command ends with\na line.": "command ends with a line",
    "The mean over all subsets, so k < n makes no bias.": "makes no bias",
    "Quantize to so many bits.": "so many bits",
    "The share of groups that taught.": "groups that taught",
    "Write the gold answer.": "gold answer",
    "It goes on from adapters, here of the first run.": "goes on from",
    "Of a larger file it has the completions.": "Of a larger",
    "Completions are drawn in full precision.": "Completions are drawn",
    "The model is asked as in training.": "model is asked as",
    "Put it into a file of yours.": "a file of yours",
    "Rows of nobody fill a batch up to a size.": "Rows of nobody",
    "A request, and what has come of it.": "what has come of",
}
PLAIN = (
    "The run resumes from the last checkpoint. It goes on until the data is used up.",
    "So many users asked for this that we added it. Nothing is ever deleted.",
    "The completion ends with a line break; the file ends with a line of dashes.",
    "A teacher scores each sampled token. The picture is drawn again after a change.",
    "If you have to change something, the command prints one line and exits with code 2.",
    "Most of a step is spent on sampling, and a hundredth of a second on the rest.",
    "The line behind the model's name. Wait until the whole file is written.",
)


@pytest.mark.parametrize(("text", "phrase"), DIALECT.items())
def test_a_phrase_of_the_list_is_found(text, phrase):
    """Whatever its case, and across a line break."""
    found = [each for _, each, _ in plain_english.faults(text)]
    assert any(phrase in each for each in found), found


@pytest.mark.parametrize("text", PLAIN)
def test_a_plain_sentence_passes(text):
    """The list has no false alarms on sentences that use the same words well."""
    assert list(plain_english.faults(text)) == []


def test_only_prose_of_a_page_is_read(tmp_path, monkeypatch):
    """Code and tables made from the code do not count, and a line number is the page's."""
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "```\nby heart\n```\n`by heart`\n<!-- keys:begin -->\nby heart\n<!-- keys:end -->\nNot by heart.\n"
    )
    assert plain_english.faults_of(page) == ["page.md:8: 'by heart'; plainer: overfits"]
    code = tmp_path / "code.py"
    code.write_text('"""Learns."""\n\nby = heart  # by heart\nprint(f"{by} learns by heart")\n')
    assert plain_english.faults_of(code) == ["code.py:4: 'by heart'; plainer: overfits"]


def test_the_project_is_free_of_the_listed_phrases():
    """`make lint` says the same, with the plainer wording for each place."""
    assert plain_english.all_faults() == []


def test_a_draw_can_be_repeated():
    """The same seed gives the same sentences, the same number from each source."""
    first, again = ([*plain_english.draw(7, count=3)] for _ in range(2))
    assert first == again and len([line for line in first if line.startswith("- ")]) == 12


def test_a_draw_reads_a_docstring_by_its_structure(tmp_path, monkeypatch):
    """Entries of arguments are texts of their own; formulas, and code that is indented, are left out."""
    (tmp_path / "code.py").write_text(
        '"""Sums two numbers. (Neither may be NaN.)\n\n    x = a + b\n\nArgs:\n    a: the first\n'
        '        of two numbers.\n    b: the other number.\n\nReturns:\n    The sum of\n    both.\n"""\n'
    )
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    texts = plain_english._code_texts(".")[1]
    assert [" ".join(text.split()) for text in texts if text.strip()] == [
        "Sums two numbers. (Neither may be NaN.)",
        "a: the first of two numbers.",
        "b: the other number.",
        "The sum of both.",
    ]
