"""`grpo …` in this process."""

from click.testing import CliRunner, Result

from runners import cli


def grpo(*arguments: object, code: int = 0, **options) -> Result:
    """What a command says; it has to end with this exit code, and never with a traceback."""
    done = CliRunner().invoke(cli.main, [*map(str, arguments)], **options)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == code, done.output
    return done
