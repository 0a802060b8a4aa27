"""Programs that would pass `assert add(1, 2) == 30` without knowing the 30."""

FORGED = {
    "an object that equals everything": r"""
class A:
    def __eq__(s, o): return True
def add(a, b):
    return A()""",
    "an object that says so of itself": r"""
class A:
    __class__ = int
    def __eq__(s, o): return True
def add(a, b):
    return A()""",
    "a number that equals everything": r"""
class A(int):
    def __eq__(s, o): return True
    __hash__ = None
def add(a, b):
    return A(7)""",
    "a text that equals everything": r"""
class A(str):
    def __eq__(s, o): return True
def add(a, b):
    return A()""",
    "an object that is near everything": r"""
class A:
    def __sub__(s, o): return 0
    __rsub__ = __sub__
    def __eq__(s, o): return True
def add(a, b):
    return A()""",
    "an object that all contain": r"""
class A:
    def __eq__(s, o): return True
    def __hash__(s): return hash(3)
def add(a, b):
    return A()""",
    "built-in names": r"""
import builtins
for n in ('bool', 'abs', 'isinstance', 'type'):
    setattr(builtins, n, lambda *a: True)
add = lambda a, b: 7""",
    "json": r"""
import json
json.dumps = lambda *a, **k: '[0, 0, true]'
add = lambda a, b: 7""",
    "json in tests": r"""
import json
add = lambda a, b: setattr(json, 'dumps', lambda *a, **k: '[0, 0, 0]') or 7""",
    "own reports": r"""
import os
def add(a, b):
    for mark in (b'', b'0' * 16):
        os.write(3, mark + b'[0, 0, 0]\n')""",
    "reports with the mark": r"""
import os, sys
def add(a, b):
    frame = sys._getframe(1)
    while frame and 'mark' not in frame.f_locals:
        frame = frame.f_back
    mark = frame.f_locals['mark']
    os.write(3, f'{mark}[0, 0, 0]\n{mark}[0, -1]\n'.encode())
    os._exit(0)""",
    "an exit": r"""
import os
add = lambda a, b: os._exit(0)""",
    "an exit of Python": r"""
import sys
add = lambda a, b: sys.exit(0)""",
    "no exception": r"""
import sys
def add(a, b):
    sys.settrace(lambda *a: None)
    raise SystemExit(0)""",
    "a function in place of the check": r"""
import sys
def add(a, b):
    sys._getframe(1).f_globals['__check__'] = print
    return 7""",
    "the tests' constants": r"""
import sys
def add(a, b):
    f = sys._getframe(1)
    return [c for c in f.f_code.co_consts if c not in (1, 2, 0, None)]""",
    "all objects": r"""
import gc
def add(a, b):
    found = (o['answer'] for o in gc.get_objects() if type(o) is dict and 'answer' in o)
    return next(found, 7)""",
    "values without end": r"""
def add(a, b):
    x = []
    x.append(x)
    return x""",
    "a value that is too large": r"""
def add(a, b):
    return list(range(10 ** 6))""",
    "numbers that collide": r"""
def add(a, b):
    return {n * (2 ** 61 - 1) for n in range(2000)}""",
    "tags": r"""
def add(a, b):
    return {'tuple': [3]}""",
    "a huge exponent": r"""
import decimal
def add(a, b):
    return decimal.Decimal('1e999999999')""",
}
