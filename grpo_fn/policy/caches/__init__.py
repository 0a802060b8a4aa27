"""Keys and values of rows: shared prompts, the rows' own tokens, and tokens that are added
later.
"""
