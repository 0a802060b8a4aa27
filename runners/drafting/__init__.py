"""A first config: what a model and a data set are, and the TOML file that fits them."""
