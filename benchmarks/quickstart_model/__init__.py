"""Makes the shipped data, tokenizer and model anew. Nothing else imports it."""
