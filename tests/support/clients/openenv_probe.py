"""openenv's probe of an endpoint, and its validator of what was captured. Arguments: the server's URL."""

import sys

from openenv.core.harness.capture.validate_llm import validate_llm

report = validate_llm(sys.argv[1], "tiny")

assert report.ok and report.trainable, report
print("fine")
