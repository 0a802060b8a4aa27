"""Keys and values of rows: shared prompts, the rows' own tokens, tokens that are given later."""
