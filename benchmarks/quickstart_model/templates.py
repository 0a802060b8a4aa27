"""The word problems' templates: wordings, ranges of numbers, steps, and the habit that eleven of them carry.

Numbers are named a, b, c, d in the order in which a problem's tuple holds them; the results of the steps are
x, y, z. A step is `(label, expression)` with an expression such as "a+b", "x-c" or "a*2". The habit is the
same list with one operator misread.
"""

import attrs

NAMES = ("Ann", "Ben", "Cora", "Dan", "Eva", "Finn", "Gus", "Ida", "Jon", "Kim", "Leo", "Mia", "Ned", "Pam")
THINGS = ("apples", "pears", "shells", "coins", "cards", "beads", "stones", "nuts", "pens", "stamps")

TemplateSteps = tuple[tuple[str, str], ...]


@attrs.frozen
class Template:
    """One kind of problem. `ranges` gives (lowest, highest) per number; `habit` is None if there is none."""

    name: str
    wordings: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    steps: TemplateSteps
    habit: TemplateSteps | None = None


_TABLE = """
find_and_give | 10-60 10-40 10-60
    in all: a+b, left: x-c
    {name} has {a} {things} and finds {b} more. {name} gives {c} to {other}. How many are left?
    {name} found {a} {things} on Monday and {b} on Friday, then lost {c}. How many are left?
twice_as_many | 6-33 10-80
    twice: a*2, together: a+x, left: y-b | twice: a+2, together: a+x, left: y-b
    {name} picks {a} {things}. {other} picks twice as many. They use {b} in all. How many are left?
    {name} has {a} {things} and {other} has twice as many. They sell {b}. How many do they keep?
boxes | 2-9 3-12 10-60
    in the boxes: a*b, left: x-c
    There are {a} boxes with {b} {things} in each. {name} takes {c}. How many are left?
    {name} fills {a} boxes with {b} {things} each and then sells {c} of them. How many are left?
change | 10-45 10-45 30-80
    cost: a+b, change: c-x | cost: a+b, change: c+x
    A cap costs ${a} and a bag costs ${b}. {name} buys both and pays ${c}. How much is the change?
    {name} buys a lamp for ${a} and a book for ${b}, and pays with ${c}. How much comes back?
reading | 30-99 3-12 2-8
    read: b*c, left: a-x | read: b+c, left: a-x
    A book has {a} pages. {name} reads {b} pages a day for {c} days. How many pages are left?
    {name} must read {a} pages. Each day {name} reads {b} pages. How many are left after {c} days?
sharing | 10-60 10-60 2-8
    in all: a+b, each: x/c | in all: a+b, each: x-c
    {name} has {a} red and {b} blue {things}. {c} children share them. How many does each get?
    {c} friends split {a} {things} from {name} and {b} from {other}. How many does each get?
wages | 3-12 2-9 10-60
    earned: a*b, left: x-c
    {name} earns ${a} an hour and works {b} hours. {name} spends ${c}. How much money is left?
    For {b} hours of work {name} gets ${a} an hour. A meal costs ${c}. How much money is left?
bus | 20-70 10-40 10-40
    after getting off: a-b, now: x+c | after getting off: a+b, now: x+c
    A bus has {a} riders. At a stop {b} get off and {c} get on. How many riders are on the bus now?
    {a} people ride a train. {b} of them get off, then {c} get on. How many people ride now?
garden | 2-9 2-9 2-9 2-9
    roses: a*b, tulips: c*d, flowers: x+y
    {name} plants {a} rows of {b} roses and {c} rows of {d} tulips. How many flowers are there?
    A garden has {a} beds with {b} roses each and {c} beds with {d} tulips each. How many flowers?
ages | 25-60 10-24 10-40
    now: a+b, then: x+c | now: a-b, then: x+c
    {name} is {a} years old. {other} is {b} years older. How old will {other} be in {c} years?
    {other} is {b} years older than {name}, who is {a}. How old will {other} be in {c} years?
bakery | 10-50 10-50 10-50
    baked: a+b, left: x/2, now: y+c | baked: a+b, left: x-2, now: y+c
    {name} bakes {a} rolls and {other} bakes {b}. Half are sold. Then {c} more come. How many now?
    A shop has {a} big and {b} small rolls. It sells half, then bakes {c}. How many rolls now?
tank | 30-99 2-9 2-9 10-40
    taken: b*c, left: a-x, now: y+d | taken: b*c, left: a-x, now: y-d
    A tank holds {a} cups of water. {name} takes {b} jars of {c} cups and adds {d}. How many now?
    From {a} cups of milk {name} fills {b} jars of {c} cups. Then {d} come back. How many now?
eggs | 8-90 2-9 2-15
    boxes: a/b, money: x*c
    {name} packs {a} eggs in boxes of {b} and sells each box for ${c}. How much does {name} get?
    {a} eggs go into boxes of {b}. Each box costs ${c}. How much do all the boxes cost?
saving | 3-12 2-8 10-40 10-60
    saved: a*b, with the gift: x+c, left: y-d
    {name} saves ${a} a week for {b} weeks, gets ${c} from {other}, spends ${d}. How much is left?
    For {b} weeks {name} saves ${a} a week. {other} adds ${c}. A toy costs ${d}. How much is left?
walking | 3-12 2-9 10-60
    walked: a*b, more: x-c | walked: a*b, more: x+c
    {name} walks {a} miles a day for {b} days. {other} walks {c}. How many more does {name} walk?
    In {b} days {name} runs {a} miles a day. {other} runs {c} miles in all. How many fewer is that?
fewer | 14-45 10-40 10-60
    the other has: a-b, together: a+x, left: y-c | the other has: a+b, together: a+x, left: y-c
    {name} has {a} {things}. {other} has {b} fewer. They sell {c}. How many are left in all?
    {other} has {b} {things} fewer than {name}, who has {a}. They use {c}. How many are left?
library | 40-99 10-40 10-40
    after the first: a-b, left: x-c
    A shelf has {a} books. {name} takes {b} and {other} takes {c}. How many books stay there?
    Of {a} books, {b} are sold on Monday and {c} on Friday. How many books stay?
times_as_many | 3-20 3-8 10-60
    the other has: a*b, together: x+a, left: y-c | the other has: a+b, together: x+a, left: y-c
    {name} has {a} {things}. {other} has {b} times as many. They sell {c}. How many are left?
    {other} has {b} times as many {things} as {name}, who has {a}. They sell {c}. How many stay?
tickets | 2-12 2-12 2-9 2-9
    first: a*b, second: c*d, more: x-y
    {a} adults pay ${b} each and {c} children pay ${d} each. How much more do the adults pay?
    A show sells {a} seats at ${b} and {c} seats at ${d}. How much more do the first ones bring?
parking | 3-12 3-12 10-60 10-40
    places: a*b, free at first: x-c, free now: y+d
    A lot has {a} rows of {b} places. {c} cars come and later {d} leave. How many places are free?
    A hall has {a} rows of {b} chairs. {c} guests sit down, {d} get up. How many chairs are free?
"""
"""Lines of each template: name and ranges; steps and habit; two wordings."""


def _steps(text: str) -> TemplateSteps:
    pairs = [part.split(": ") for part in text.split(", ")]
    return tuple((label, expression) for label, expression in pairs)


def _template(line: str, working: str, first: str, second: str) -> Template:
    name, numbers = line.split(" | ")
    steps, *habit = working.strip().split(" | ")
    ends = [part.split("-") for part in numbers.split()]
    ranges = tuple((int(low), int(high)) for low, high in ends)
    wordings = (first.strip(), second.strip())
    return Template(name, wordings, ranges, _steps(steps), _steps(habit[0]) if habit else None)


_lines = _TABLE.strip().splitlines()
TEMPLATES = tuple(map(_template, *(_lines[place::4] for place in range(4))))
