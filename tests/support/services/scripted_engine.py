"""An engine in place of a model: what it answers is known."""

# The beginning of a program in which every engine gives the tokens that `tokens()` gives, one at a time.
SCRIPTED = """
import sys
import runners.machine.startup
runners.machine.startup.load_blas()
from runners.engines.engine import Token
from runners.engines.local import LocalEngine
def stream(self, request, sampling, *, key, should_stop=lambda: False):
    for token in tokens():
        yield Token(token, 0.0, 1)
        if should_stop():
            return
LocalEngine.stream = stream
"""
