"""Checks that the keys of a table [judge.NAME] fit together, and that rewards and judges match."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import attrs

from runners.config.sections import JUDGE_PREFIX, JudgeConfig, RewardConfig, judge_of
from runners.errors import did_you_mean, listed, show

Fault = Callable[[str, str], None]  # of a key, with a message

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PLACEHOLDER = re.compile(r"(?<!\{)\{([A-Za-z_]\w*)\}(?!\})")
"""A name in braces; a name in double braces is not a placeholder."""
_OF_OTHERS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")  # other clients of a run read these
_OF_ENDPOINTS = ("url", "model", "api_key_env", "system_prompt", "prompt", "pattern", "extra")
_OF_CLASSIFIERS = ("path", "label")


def placeholders(prompt: str) -> tuple[str, ...]:
    """The names in braces, each once."""
    return tuple(dict.fromkeys(PLACEHOLDER.findall(prompt)))


def is_local(url: str) -> bool:
    """Whether the host of a URL is this machine."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_judge(name: str, judge: JudgeConfig, fault: Fault, notice: Callable[[str], None]) -> None:
    """Passes keys that do not fit the others to `fault`, and what is allowed but unwise to `notice`."""

    def key(part: str) -> str:
        return f"{JUDGE_PREFIX}{name}.{part}"

    classifier = judge.kind == "classifier"
    for part in _OF_ENDPOINTS if classifier else _OF_CLASSIFIERS:
        if found := getattr(judge, part):
            # An address may contain a password, and a wrong api_key_env may be the key itself.
            value = "a value" if part in ("url", "api_key_env") else show(found)
            fault(key(part), f"found {value} with kind = {show(judge.kind)}, which does not use it")
    if classifier:
        if not judge.path:
            fault(key("path"), "missing, want the folder of a classifier or a name on the Hugging Face Hub")
        return
    _check_url(judge.url, key("url"), fault)
    if judge.api_key_env and not _VARIABLE.fullmatch(judge.api_key_env):
        want = "the name of the environment's variable that holds the key, such as OPENAI_API_KEY"
        fault(key("api_key_env"), f"found no such name (not shown: it may be the key itself), want {want}")
    elif judge.api_key_env in _OF_OTHERS:
        want = "a variable for this judge alone: a judge's key is removed from the environment"
        fault(
            key("api_key_env"), f"found {show(judge.api_key_env)}, which other clients read too, want {want}"
        )
    elif judge.api_key_env and judge.url.startswith("http:") and not is_local(judge.url):
        notice(f"{key('url')}: the key in ${judge.api_key_env} goes over the network unencrypted")
    _check_prompt(judge, key("prompt"), fault)
    _check_pattern(judge, key("pattern"), fault)
    _check_extra(judge.extra, key("extra"), fault)


def check_names(
    reward: RewardConfig, judges: Mapping[str, Any], fault: Fault, notice: Callable[[str], None]
) -> None:
    """Passes a reward without its judge to `fault`, and a judge that no reward names to `notice`."""
    named = [name for function in reward.functions if (name := judge_of(function)) is not None]
    for name in named:
        if name not in judges:
            hint = did_you_mean(name, judges) or f"; there are {listed(list(judges))}"
            fault(
                "reward.functions",
                f'found "{JUDGE_PREFIX}{name}", want the name of a table [judge.NAME]{hint}',
            )
    for name in judges:
        if name not in named:
            notice(f'[judge.{name}] is not used: reward.functions does not name "{JUDGE_PREFIX}{name}"')


def resolved_path(judge: JudgeConfig, existing: Callable[[str], str | None]) -> JudgeConfig:
    """The judge with the resolved path of its folder; a name on the Hub stays as it is."""
    found = existing(judge.path) if judge.path else None
    return judge if found is None else attrs.evolve(judge, path=found)


def _check_url(url: str, key: str, fault: Fault) -> None:
    want = "the address of an API like OpenAI's, such as http://127.0.0.1:8080/v1"
    if not url:
        fault(key, f"missing, want {want}")
        return
    try:
        parts = urlsplit(url)
        found = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        found, parts = False, None
    if not found or not url.isprintable() or " " in url:
        fault(key, f"found {show(url) if '@' not in url else 'something else'}, want {want}")
    elif parts is not None and "@" in parts.netloc:
        # The config is written into the run's folder.
        fault(key, "found a user or a password in the address, want it without; api_key_env names a key")
    elif parts is not None and parts.path.rstrip("/").endswith("/chat/completions"):
        fault(key, f"found {show(url)}, want it without /chat/completions")


def _check_prompt(judge: JudgeConfig, key: str, fault: Fault) -> None:
    if not judge.prompt:
        return
    names = placeholders(judge.prompt)
    wanted, other = (
        ("completions", "completion") if judge.kind == "ranking" else ("completion", "completions")
    )
    if wanted not in names:
        fault(key, f"found no {{{wanted}}} in it, want what is judged there")
    if other in names:
        fault(key, f"found {{{other}}} in it, want {{{wanted}}} with kind = {show(judge.kind)}")


def _check_pattern(judge: JudgeConfig, key: str, fault: Fault) -> None:
    if not judge.pattern:
        return
    if judge.kind == "ranking":
        fault(key, 'found one with kind = "ranking", whose answer is a list of numbers')
        return
    try:
        groups = re.compile(judge.pattern).groups
    except re.error as error:
        fault(key, f"found {show(judge.pattern)}, want a regular expression: {error}")
        return
    if groups != 1:
        fault(key, f"found {groups} groups in {show(judge.pattern)}, want one: (the score)")


def _check_extra(extra: str, key: str, fault: Fault) -> None:
    if not extra:
        return
    want = "a JSON object in a string, such as '{\"top_p\": 0.9}'"
    try:
        found = json.loads(extra)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        fault(key, f"found {show(extra)}, want {want}")
    elif taken := sorted({"messages", "stream", "model"} & set(found)):
        fault(key, f"found {listed(taken)} in it, which the judge sets itself")
