"""Makes the shipped data, tokenizer and model again. Nothing else imports it."""
