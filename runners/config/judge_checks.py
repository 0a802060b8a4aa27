"""Checks that the keys of a table [judge.NAME] fit together, and that rewards and judges match."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from runners.config.names import JUDGE_PREFIX, judge_of
from runners.config.reading import Settings
from runners.config.sections import JudgeConfig, RewardConfig
from runners.errors import did_you_mean, listed, show

PLACEHOLDER = re.compile(r"(?<!\{)\{([A-Za-z_]\w*)\}(?!\})")
"""A name in braces; a name in double braces is not a placeholder."""
_OF_OTHERS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")  # other clients of a run read these
_URL = "the address of an API like OpenAI's, such as http://127.0.0.1:8080/v1"


def placeholders(prompt: str) -> tuple[str, ...]:
    """The names in braces, each once."""
    return tuple(dict.fromkeys(PLACEHOLDER.findall(prompt)))


def is_local(url: str) -> bool:
    """Whether the host of a URL is this machine."""
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def check_judge(name: str, judge: JudgeConfig, found: Settings) -> None:
    """Adds a fault for each key that does not fit the others, and a notice for what is allowed but unwise."""
    faults = {
        "url": _url_fault(judge.url),
        "api_key_env": _variable_fault(judge.api_key_env),
        "prompt": _prompt_fault(judge),
        "pattern": _pattern_fault(judge),
        "extra": _extra_fault(judge.extra),
    }
    if judge.api_key_env and judge.url.startswith("http:") and not is_local(judge.url):
        key = f"{JUDGE_PREFIX}{name}.url"
        found.notices.append(f"{key}: the key in ${judge.api_key_env} goes over the network unencrypted")
    for key, fault in faults.items():
        if fault:
            found.fault(("judge", name, key), f"expected {fault}")


def check_names(reward: RewardConfig, judges: Mapping[str, Any], found: Settings) -> None:
    """Adds a fault for a reward without its judge, and a notice for a judge that no reward names."""
    named = [name for function in reward.functions if (name := judge_of(function)) is not None]
    for name in named:
        if name not in judges:
            hint = did_you_mean(name, judges) or f"; there are {listed(list(judges))}"
            message = f'expected the name of a table [judge.NAME], found "{JUDGE_PREFIX}{name}"{hint}'
            found.fault(("reward", "functions"), message)
    for name in judges:
        if name not in named:
            said = f'reward.functions does not name "{JUDGE_PREFIX}{name}"'
            found.notices.append(f"[judge.{name}] is not used: {said}")


def _url_fault(url: str) -> str:
    parts, is_url = None, False
    with suppress(ValueError):
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    if parts is None or not is_url or not url.isprintable() or " " in url:
        return f"{_URL}, found {'nothing' if not url else 'something else' if '@' in url else show(url)}"
    if "@" in parts.netloc:  # the config is written into the run's folder
        return "no user or password in the address, found one; api_key_env names a key"
    is_whole = parts.path.rstrip("/").endswith("/chat/completions")
    return f"the address without /chat/completions, found {show(url)}" if is_whole else ""


def _variable_fault(name: str) -> str:
    if name and not (name.isidentifier() and name.isascii()):
        expected = "the name of the environment's variable that holds the key, such as OPENAI_API_KEY"
        return f"{expected}, found another text (not shown: it may be the key itself)"
    expected = "a variable for this judge alone (a judge's key is removed from the environment)"
    return f"{expected}, found {show(name)}, which other clients read too" if name in _OF_OTHERS else ""


def _prompt_fault(judge: JudgeConfig) -> str:
    names, both = placeholders(judge.prompt), ("completion", "completions")
    one, other = reversed(both) if judge.kind == "ranking" else both
    if not judge.prompt or (one in names and other not in names):
        return ""
    shown = f"{{{other}}}" if other in names else "no such name"
    return f"{{{one}}} where the judged text stands, found {shown}"


def _pattern_fault(judge: JudgeConfig) -> str:
    if not judge.pattern:
        return ""
    if judge.kind == "ranking":
        return 'none with kind = "ranking", whose answer is a list of numbers, found one'
    try:
        groups = re.compile(judge.pattern).groups
    except re.error as error:
        return f"a regular expression, found {show(judge.pattern)}: {error}"
    return "" if groups == 1 else f"one group, (the score), found {groups} in {show(judge.pattern)}"


def _extra_fault(extra: str) -> str:
    found = None
    with suppress(ValueError, RecursionError):
        found = json.loads(extra or "{}")
    if not isinstance(found, dict):
        return f"a JSON object in a string, such as '{{\"top_p\": 0.9}}', found {show(extra)}"
    taken = sorted({"messages", "stream", "model"} & set(found))
    return f"none of the keys that the judge sets itself, found {listed(taken)}" if taken else ""
