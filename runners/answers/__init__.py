"""What counts as a right answer: how it is read from a completion,
and how two answers are compared."""
