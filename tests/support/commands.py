"""`grpo …` in this process."""

from click.testing import CliRunner, Result

from runners import cli


def grpo(*arguments: object, code: int | None = 0, **options) -> Result:
    """A command's result; it must end with this exit code (None: any), and without a traceback."""
    done = CliRunner().invoke(cli.main, [*map(str, arguments)], **options)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert code in (done.exit_code, None), done.output
    return done
