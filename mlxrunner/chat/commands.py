"""The commands of a chat that work on its turns, settings, files and figures."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrunner.chat.conversation import POLICIES, UndoState
from mlxrunner.chat.input import (
    PATH,
    Command,
    flagged,
    picture_paths,
    quoted,
    read_text,
    whole_number,
)
from mlxrunner.chat.view import code_blocks
from mlxrunner.config.file import NAMED, Config, read_config_file
from mlxrunner.config.names import did_you_mean
from mlxrunner.config.option import DEFAULT, HERE, described, layer, settled, values
from mlxrunner.errors import OptionError, OutputError
from mlxrunner.options import (
    CHOOSING,
    EMBEDDED,
    GREEDY,
    OVERFLOW,
    GenerateOptions,
    RunnerSettings,
    chat_options,
)
from mlxrunner.profiling.schema import PARTING, explain_reuse, remedy
from mlxrunner.results import Usage
from mlxrunner.system.speed import PrefillCurve
from mlxrunner.system.writing import why_not, written
from mlxrunner.templates.messages import PlainMessage, without_thinking
from mlxrunner.terminal.control import copy
from mlxrunner.terminal.output import count_of, seconds, size

if TYPE_CHECKING:
    from mlxrunner.chat.conversation import Conversation
    from mlxrunner.chat.repl import Chat


Run = Callable[["Chat", str], None]
SETTABLE = dict(chat_options())
"""The options of a request that `/set` knows, by name."""
CONTEXT = described(RunnerSettings)["context"]
GREEDILY = "greedy"
"""The word that stands for the options of GREEDY."""
STANDARD = vars(GenerateOptions()) | {"overflow": "shift"}
"""The options of a chat that sets none."""


def parse_settings(text: str) -> dict[str, Any]:
    """Return the options of a request that a text such as `temperature=0.8 seed=3` gives.

    Raise OptionError for an unknown name or a value out of range.
    """
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError as error:
        raise OptionError(f"{text}: {error}") from error
    for name, found, _ in pairs:
        if not found and name != GREEDILY:
            raise OptionError(f"{name}: has to be NAME=VALUE, as temperature=0.8")
    options: dict[str, Any] = {}
    for given, found, value in pairs:
        if not found:
            options |= GREEDY
            continue
        name = _known(given, tuple(SETTABLE))
        options[name] = SETTABLE[name].parse(name, value)
    GenerateOptions.of(**options)
    return options


COMMANDS: list[Command] = []
"""The commands of this module, in the order of /help."""


def command(
    name: str,
    takes: str,
    help: str,
    words: Callable[[Chat, str], Iterable[str]] = lambda chat, before: (),
    *,
    is_daily: bool = False,
) -> Callable[[Run], Run]:
    """Add a function to `COMMANDS`; the arguments are fields of `Command`."""

    def add(run: Run) -> Run:
        COMMANDS.append(Command(name, takes, help, run, words, is_daily))
        return run

    return add


@command("/undo", "[N]", "remove the last turn, or the last N", is_daily=True)
def undo(chat: Chat, argument: str) -> None:
    taken = chat.conversation.undo(whole_number(argument, default=1))
    if not taken:
        raise OptionError("there is no turn to remove")
    left = count_of(len(chat.conversation.history.turns), "turn")
    chat.say(
        f"{count_of(len(taken), 'turn')} removed, {left} left: "
        f"{chat.conversation.outlook()}; /redo restores {'it' if len(taken) == 1 else 'them'}"
    )


@command("/redo", "", "undo the last /undo, /clear, /edit, /retry or /system", is_daily=True)
def redo(chat: Chat, argument: str) -> None:
    conversation, name = chat.conversation, chat.branches.current
    present = conversation.branch
    branch = chat.undo_history.pop(name, present)
    if branch is None:
        raise OptionError(f"there is nothing to restore on branch {name}")
    chat.branches.drop_kept_within(branch)
    kept = ""
    if UndoState(name, present).is_lost_in(branch):
        kept = f"; the previous conversation is branch {chat.branches.keep(name, present)}"
    conversation.switch_to(branch)
    turns = count_of(len(branch.history.turns), "turn")
    chat.say(f"restored, {turns}: {conversation.outlook()}{kept}")


@command("/edit", "[N]", "edit message N, or your last, and continue there", is_daily=True)
def edit(chat: Chat, argument: str) -> None:
    """Edit the message with a number of /show: the user's are odd, the answers even."""
    messages, history = chat.conversation.messages, chat.conversation.history
    if not messages:
        raise OptionError("there is nothing to edit yet")
    number = whole_number(argument, default=len(messages) - 1)
    if number > len(messages):
        raise OptionError(
            f"there is no message {number}: the last one is {len(messages)}, see /show"
        )
    turn, before = (number - 1) // 2, messages[number - 1]["content"]
    is_answer = number % 2 == 0
    text = chat.edit(before, None if is_answer else history.cut(turn))
    if text is None:
        chat.say("nothing changed")
    elif is_answer:
        chat.conversation.answer_with(turn, text)
        left = count_of(turn + 1, "turn")
        chat.say(
            f"the answer of turn {turn + 1} is changed, {left} left: {chat.conversation.outlook()}"
        )
    else:
        chat.send(text, history.cut(turn))


@command(
    "/retry",
    "[NAME=VALUE ...]",
    "answer the last message again, with these settings",
    lambda chat, before: (GREEDILY, *(f"{name}=" for name in SETTABLE)),
    is_daily=True,
)
def retry(chat: Chat, argument: str) -> None:
    history = chat.conversation.history
    if not history.turns:
        raise OptionError("there is no answer to repeat")
    options = parse_settings(argument)
    merged: dict[str, Any] = chat.conversation.effective | options
    if not merged.get("temperature") and not options:
        chat.say("the temperature is 0, so the answer will be the same: try /retry temperature=0.8")
    elif merged.get("seed") is not None and not options:
        seed = merged["seed"]
        chat.say(f"the seed is {seed}, so the answer will be the same: try /retry seed={seed + 1}")
    *earlier, last = history.turns
    chat.answer(last.user, history.cut(len(earlier)), **options)


@command(
    "/branch",
    "[-d] [NAME]",
    "continue as branch NAME; alone: list; -d: delete one",
    lambda chat, before: chat.branches,
)
def branch(chat: Chat, argument: str) -> None:
    drop, name = flagged(argument, "-d")
    if drop:
        dropped = count_of(len(chat.branches.drop(name).history.turns), "turn")
        chat.say(f"branch {name} deleted, with {dropped}")
    elif argument:
        chat.branches.fork(argument, chat.conversation.branch)
        chat.say(f"on branch {argument}: {chat.conversation.outlook()}")
    else:
        for name in chat.branches:
            chat.say(f"{'*' if name == chat.branches.current else ' '} {name}")


@command("/switch", "NAME", "switch to another branch", lambda chat, before: chat.branches)
def switch(chat: Chat, argument: str) -> None:
    conversation = chat.conversation
    conversation.switch_to(chat.branches.switch(argument, conversation.branch))
    turns = count_of(len(conversation.history.turns), "turn")
    chat.say(f"on branch {argument}, {turns}: {conversation.outlook()}")


@command("/clear", "", "clear the conversation, but not the system prompt", is_daily=True)
def clear(chat: Chat, argument: str) -> None:
    had_turns = bool(chat.conversation.history.turns)
    chat.conversation.clear()
    chat.attachments.clear()
    back = "; /redo restores it" if had_turns else ""
    chat.say(f"conversation cleared{back}")


@command(
    "/system",
    "[TEXT]",
    "set the system prompt; @NAME: one of the config file",
    lambda chat, before: [f"{NAMED}{name}" for name in read_config_file().prompts],
    is_daily=True,
)
def system(chat: Chat, argument: str) -> None:
    conversation = chat.conversation
    if argument:
        is_none = argument in ('""', "''")
        conversation.set_system(None if is_none else read_config_file().system(argument))
    chat.say(f"system prompt: {conversation.system or '(none)'}")
    if argument and conversation.history.turns:
        chat.say(f"the conversation stays: {conversation.outlook()}")


def setting_words(chat: Chat, before: str) -> Iterable[str]:
    """Return the names of all settings, or the values of the one that `before` names."""
    names = (*SETTABLE, GREEDILY, "context", "history")
    if not before:
        return names
    values = {"history": POLICIES, "overflow": (*OVERFLOW, DEFAULT)}
    name = before.strip().replace("-", "_")
    return values.get(name, (DEFAULT,)) if name in names and name != GREEDILY else ()


def _model_names(chat: Chat, before: str) -> Iterable[str]:
    from mlxrunner.models.resolve import cached_models

    return [*EMBEDDED, *read_config_file().aliases, *(found.name for found in cached_models())]


OTHER_WAYS = {
    "think": "/think on turns thinking on",
    "nothink": "/think off turns thinking off",
    "verbose": "/stats shows the speed of the last answer",
    "format": "mlxrunner generate --schema FILE gives JSON",
}
"""The way here to what ollama has after /set."""


@command(
    "/set",
    "[NAME VALUE]",
    "change it (default: reset; or greedy); alone: list",
    setting_words,
    is_daily=True,
)
def set_(chat: Chat, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if name == "parameter" and value:  # as ollama has it
        name, _, value = value.strip().partition(" ")
    if name == "system":
        raise OptionError(f"the system prompt is not a setting: /system {value or 'TEXT'} sets it")
    if not name:
        show_settings(chat)
        return
    if argument == GREEDILY:
        chat.conversation.options |= GREEDY
        chat.say(f"sampling: {chat.conversation.sampling}")
        return
    name, value = _known(name, (*SETTABLE, "context", "history")), value.strip()
    if not value:
        chat.say(f"{name} = {_shown(chat, name)}")
    elif name == "context":
        chat.loaded.change(
            chat.model, context=None if value == DEFAULT else CONTEXT.parse(name, value)
        )
        chat.say(
            f"loaded again with a context of {chat.runner.context} tokens; "
            "the conversation is evaluated again"
        )
    elif name == "history":
        if value not in POLICIES:
            raise OptionError(
                f"history: {value!r} is not known, it has to be one of {', '.join(POLICIES)}"
            )
        chat.conversation.set_policy(value)
        chat.say(f"history = {value}: {chat.conversation.outlook()}")
    else:
        options = {known: old for known, old in chat.conversation.options.items() if known != name}
        if value != DEFAULT:
            options[name] = SETTABLE[name].parse(name, value)
        GenerateOptions.of(**options)
        chat.conversation.options = options
        chat.say(f"{name} = {_shown(chat, name)}")


def show_settings(chat: Chat) -> None:
    for name in ("context", "history", *SETTABLE):
        chat.say(f"{name:20}{_shown(chat, name):16}({_source(chat, name)})")


@command("/show", "[N]", "show settings and messages; N: the whole message N", is_daily=True)
def show(chat: Chat, argument: str) -> None:
    if argument:
        show_message(chat, argument)
        return
    conversation = chat.conversation
    chat.say(
        f"model     {chat.model}, context of {chat.runner.context} tokens, "
        f"history {conversation.policy}"
    )
    others = {
        name: value
        for name, value in conversation.effective.items()
        if name not in CHOOSING and value not in (STANDARD.get(name), ())
    }
    chat.say(
        ", ".join(
            (
                f"sampling  {conversation.sampling}",
                *(f"{name} {value}" for name, value in others.items()),
            )
        )
    )
    chat.say(f"branch    {chat.branches.current} of {', '.join(chat.branches)}")
    chat.say(f"system    {conversation.system or '(none)'}")
    for number, message in enumerate(conversation.messages, 1):
        line = " ".join(message["content"].split())
        chat.say(f"{number:4} {message['role']:10}{line[:100]}{' ...' if len(line) > 100 else ''}")


def show_message(chat: Chat, argument: str) -> None:
    messages = chat.conversation.messages
    if argument.isalpha():  # as ollama has it: info, parameters, system ...
        raise OptionError(
            f"/show {argument}: N is the number of a message; /show alone shows model, settings "
            "and system prompt"
        )
    number = whole_number(argument, default=len(messages))
    if number > len(messages):
        raise OptionError(
            f"there is no message {number}: "
            + (f"the last one is {len(messages)}" if messages else "nothing was said yet")
        )
    message = messages[number - 1]
    chat.say(f"{number} {message['role']}:")
    chat.say(message["content"], is_verbatim=True)


@command(
    "/think",
    "[show|hide|on|off]",
    "show or hide thinking; turn it on or off",
    lambda chat, before: ("show", "hide", "on", "off"),
)
def think(chat: Chat, argument: str) -> None:
    conversation = chat.conversation
    if argument in ("show", "hide"):
        chat.show_thinking = argument == "show"
    elif argument in ("on", "off"):
        if not _has_switch(chat):
            raise OptionError("this model's template has no switch for thinking")
        conversation.variables = {**conversation.variables, "enable_thinking": argument == "on"}
    elif argument:
        raise OptionError(f"/think {argument}: must be show, hide, on or off")
    wanted = conversation.variables.get("enable_thinking")
    switched = "the template's default" if wanted is None else "on" if wanted else "off"
    chat.say(f"thinking is {'shown' if chat.show_thinking else 'hidden'}; it is {switched}")


def _has_switch(chat: Chat) -> bool:
    probe: Any = chat.conversation.history.messages(None) or [{"role": "user", "content": "x"}]
    return (
        len({chat.runner.tokenizer.render(probe, enable_thinking=on) for on in (True, False)}) > 1
    )


@command(
    "/model", "[NAME]", "switch models (rereads the conversation)", _model_names, is_daily=True
)
def model(chat: Chat, argument: str) -> None:
    if argument:
        config = read_config_file()
        name = config.name_of(argument)
        chat.loaded.change(name, **_loading_changes(chat, config, name))
    chat.say(f"model: {chat.model}, context of {chat.runner.context} tokens")


def _loading_changes(chat: Chat, config: Config, name: str) -> dict[str, Any]:
    """Return what the config file says about loading the model `name`, unless the user has said it.

    What it says about the present model ends with that model.
    """
    before, after = config.options("chat", chat.model), config.options("chat", name)
    usual = layer(vars(RunnerSettings()), DEFAULT)
    before, after = settled(usual, before), settled(usual, after)
    now = values(usual) | chat.loading
    return {
        key: after[key].value
        for key in usual
        if after[key] != before[key] and now[key] == before[key].value
    }


def _shown(chat: Chat, name: str) -> str:
    if name == "context":
        return str(chat.runner.context)
    if name == "history":
        return chat.conversation.policy
    value = chat.conversation.effective.get(name)
    value = STANDARD[name] if value is None or value == () else value
    if name == "stop":
        return ", ".join(map(json.dumps, [value] if isinstance(value, str) else value)) or "(none)"
    return "(none)" if value is None else str(value)


def _source(chat: Chat, name: str) -> str:
    """Return where the value of a setting comes from."""
    if name == "context":
        of_file = read_config_file().options("chat", chat.model).get(name)
        value = chat.loading.get(name)
        if of_file is not None and of_file.value == value:
            return of_file.source
        return DEFAULT if value is None else HERE
    if name == "history":
        return DEFAULT if chat.conversation.policy == POLICIES[0] else HERE
    if name in chat.conversation.options:
        return HERE
    setting = chat.conversation.usual.get(name)
    return DEFAULT if setting is None else setting.source


def _known(name: str, names: tuple[str, ...]) -> str:
    name = name.replace("-", "_")
    if name not in names:
        known = f"there are {', '.join(names)}"
        way = OTHER_WAYS.get(name) or did_you_mean(name, names).strip() or known
        raise OptionError(f"there is no setting {name}: {way}")
    return name


@command("/stats", "", "show reuse and speed of the last turn and the session", is_daily=True)
def stats(chat: Chat, argument: str) -> None:
    conversation, usages = chat.conversation, chat.conversation.usages
    if not usages:
        chat.say("no turn yet")
        return
    for name, line in table(conversation, usages):
        chat.say(f"{name:11}{line}")


def table(conversation: Conversation, usages: Sequence[Usage]) -> Iterator[tuple[str, str]]:
    """Yield the lines of /stats, each with its title."""
    last = usages[-1]
    why = last.cache.evicted_by or last.cache.trim_limited_by
    reason = f" ({last.reason}{f': {why}' if why else ''})" if last.reason else ""
    ahead = (
        f" ({last.cache.prefetched_tokens} of them while you read and typed)"
        if last.cache.prefetched_tokens
        else ""
    )
    cache, timing = last.cache, last.timing
    yield (
        "last turn",
        f"{last.outcome}{reason}: {last.prompt_tokens} prompt tokens, "
        f"{cache.matched_tokens} matched",
    )
    yield (
        "",
        f"{last.cached_tokens} cached{ahead}, {last.missed_tokens} missed, "
        f"{last.displaced_tokens} displaced, {last.new_tokens} new; {cache.trimmed_tokens} trimmed",
    )
    yield (
        "",
        f"first token after {timing.ttft_s * 1000:.0f} ms, "
        f"prefill {timing.prefill_rate:.0f} tokens/s",
    )
    yield (
        "",
        f"answer of {last.completion_tokens} tokens, {last.timing.decode_rate:.0f} tokens/s"
        f"{drafted(last)}",
    )
    prompt, cached = (
        sum(u.prompt_tokens for u in usages),
        sum(u.cached_tokens - u.cache.prefetched_tokens for u in usages),
    )
    yield (
        "session",
        f"{count_of(len(usages), 'turn')}; {cached} of {prompt} prompt tokens reused "
        f"({cached / prompt:.0%}), {sum(u.missed_tokens for u in usages)} missed, "
        f"{sum(u.displaced_tokens for u in usages)} displaced",
    )
    if cached:
        saved, is_all = saved_seconds(usages, conversation.runner.prefill_step)
        yield "", f"which saved {'about' if is_all else 'at least'} {seconds(saved)}"
    entry = conversation.runner.entry
    yield "KV cache", f"{len(entry.tokens)} of {conversation.runner.context} tokens"
    yield "", f"{size(entry.used_bytes)} used, {size(entry.nbytes)} allocated"
    yield (
        "history",
        f"{conversation.policy}; drift from the template: {conversation.drift() or 'not known'}",
    )


def saved_seconds(usages: Sequence[Usage], step: int) -> tuple[float, bool]:
    """Return the seconds that evaluating the reused tokens in chunks of `step` would have taken.

    The measured prefills give the estimate. The second value is False if they were too short for
    all of it: then only the tokens of each turn that they reach count.
    """
    curve, saved, is_all = PrefillCurve(), 0.0, True
    for usage in usages:
        if usage.evaluated_tokens and not usage.cache.reevaluated_tokens:
            curve.add(
                usage.cached_tokens,
                usage.cached_tokens + usage.evaluated_tokens,
                usage.timing.prefill_s,
            )
        reused = usage.cached_tokens - usage.cache.prefetched_tokens
        reached = min(reused, curve.most(step))
        saved += curve.seconds(reached, step) or 0.0
        is_all = is_all and reached == reused
    return saved, is_all


def drafted(usage: Usage) -> str:
    """Return how many tokens of an answer were guessed right, or "" if none was guessed."""
    if not usage.drafts:
        return ""
    right = sum(use.accepted for use in usage.drafts)
    passes = "1 pass" if usage.draft_passes == 1 else f"{usage.draft_passes} passes"
    return f", {right} of them guessed right in {passes}"


@command("/explain", "", "show why the last turn did not reuse more", is_daily=True)
def explain(chat: Chat, argument: str) -> None:
    if not chat.conversation.usages:
        chat.say("no turn yet")
        return
    for line in explanation(chat.conversation.usages[-1], chat.parted_by):
        chat.say(line)


def explanation(usage: Usage, parted_by: str = "") -> list[str]:
    """Return lines that say why a turn did not reuse more.

    `parted_by`: the command of the user that changed the conversation before the turn.
    """
    lines = [explain_reuse(usage.as_dict())]
    if parted_by and usage.reason in (*PARTING, "evicted"):
        lines.append(f"that is the effect of {parted_by}")
    elif mend := remedy(usage.reason, has_one_entry=True):
        lines.append(f"remedy: {mend}")
    if usage.missed_tokens:
        lines.append(f"{usage.missed_tokens} missed tokens had been evaluated before")
    if usage.displaced_tokens:
        lines.append(
            f"{usage.displaced_tokens} displaced tokens were in the turn before, too, after the "
            "place that changed"
        )
    if usage.cache.checkpoint is not None:
        lines.append(f"a checkpoint at token {usage.cache.checkpoint} was used")
    if usage.cache.trimmed_tokens:
        lines.append(
            f"{usage.cache.trimmed_tokens} cached tokens were trimmed, because the prompt "
            "differs from there on"
        )
    if usage.cache.shifted_tokens:
        again = (
            f", {usage.cache.reevaluated_tokens} evaluated again for it"
            if usage.cache.reevaluated_tokens
            else ""
        )
        lines.append(
            f"the context was full: {usage.cache.shifted_tokens} of the oldest tokens "
            f"were dropped{again}"
        )
    return lines


@command(
    "/file", f"[-d] [{PATH}]", "add a file to the next text; alone: list; -d: remove", is_daily=True
)
def attach(chat: Chat, argument: str) -> None:
    drop, name = flagged(argument, "-d")
    attached = chat.attachments.texts
    if drop and name and name not in attached:
        raise OptionError(
            f"{name} is not attached to the next message: /file lists the attached ones"
        )
    if drop:
        for one in [name] if name else list(attached):
            del attached[one]
    elif name:
        attached[name] = read_text(name, chat.runner)
    for one, text in attached.items():
        chat.say(f"{one} ({size(len(text.encode()))}) is attached to the next message")
    if not attached:
        chat.say("no file is attached to the next message")


@command("/image", f"[-d] [{PATH}]", "add a picture to the text; alone: list; -d: remove")
def show_picture(chat: Chat, argument: str) -> None:
    drop, given = flagged(argument, "-d")
    waiting = chat.attachments.pictures
    if drop:
        waiting.clear()
    elif given:
        for path in picture_paths(given) or [given]:
            name = chat.see(path)
            if name not in waiting:
                waiting.append(name)
    for name in waiting:
        chat.say(f"{name} is attached to the next message")
    if not waiting:
        chat.say("no picture is attached to the next message")


@command("/editor", "[TEXT]", "write the next text in $EDITOR; Enter then sends it")
def write_outside(chat: Chat, argument: str) -> None:
    chat.begun = quoted(chat.write(argument))


@command(
    "/copy",
    "[code]",
    "copy the last answer; code: its last block of code",
    lambda chat, before: ("code",),
    is_daily=True,
)
def copy_answer(chat: Chat, argument: str) -> None:
    if argument not in ("", "code"):
        raise OptionError(f"/copy {argument}: /copy copies the last answer, /copy code its code")
    turns = len(chat.conversation.history.turns)
    if not turns:
        raise OptionError("there is no answer to copy yet")
    if not argument:
        text = _answer(chat, turns - 1)
        chat.say(f"copied {len(text)} characters {copy(text)}")
        return
    for number in reversed(range(turns)):
        if blocks := code_blocks(_answer(chat, number)):
            lines = count_of(len(blocks[-1].splitlines()), "line")
            chat.say(f"copied {lines} of code in message {2 * number + 2} {copy(blocks[-1])}")
            return
    raise OptionError("no answer has a block of code: /copy copies the whole last answer")


def _answer(chat: Chat, number: int) -> str:
    """Return the answer of turn `number` (from 0) without its thinking."""
    history = chat.conversation.history
    asked = chat.conversation.renderer.asked(history, number)
    return without_thinking(history.turns[number].answer, asked.text)


@command("/export", f"[-f] {PATH}", "write Markdown, or JSON for PATH.json; -f: overwrite")
def export(chat: Chat, argument: str) -> None:
    force, name = flagged(argument, "-f")
    if not name:
        raise OptionError("/export FILE: which file? FILE.json for JSON, anything else is Markdown")
    path, conversation = Path(os.path.expanduser(name)), chat.conversation
    text = transcript(name, conversation.system, conversation.messages, chat.model)
    try:
        with written(path, force=force) as stream:
            stream.write(text)
    except FileExistsError as error:
        raise OutputError(f"{name} is there already: /export -f {name} overwrites it") from error
    except OSError as error:
        raise OutputError(f"{name}: {why_not(error, path)}") from error
    chat.say(f"{count_of(len(conversation.history.turns), 'turn')} written to {name}")


def transcript(file: str, system: str | None, messages: Sequence[PlainMessage], model: str) -> str:
    """Return the text of a conversation: JSON if the name `file` ends in .json, else Markdown."""
    if file.endswith(".json"):
        content = {"model": model, "system": system, "messages": messages}
        return json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    prompt = [f"## System\n\n{system}\n"] if system else []
    headed = (f"## {one['role'].capitalize()}\n\n{one['content']}\n" for one in messages)
    return "\n".join([*prompt, *headed])
