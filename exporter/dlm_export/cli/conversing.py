"""Defines the command ``chat``, and declares options for messages and tools."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlm_export.cli.options import (
    CALL_FORMATS,
    CHECKPOINT,
    choice,
    command,
    effort_option,
    file,
    flag,
    group,
    number,
    opening_group,
    options,
    preset_option,
    prompt_cache_option,
    set_option,
    text,
)
from dlm_export.cli.printing import how_it_went, one_line, print_text, warn
from dlm_export.cli.values import opening, policy_changes, read_json_file
from dlm_export.signals import interrupted_by
from dlm_runtime import Bundle, DlmError, Generation, RequestError

if TYPE_CHECKING:
    from rich.console import Console

KEPT_BYTES = 1 << 30
"""The maximum number of bytes of keys and values that ``chat`` stores between answers."""
_TOOL_OPTIONS = {"tools": "--tools", "tool_choice": "--tool-choice", "call_format": "--call-format"}


chat_option = text("--chat", "A user's message, sent through the chat template.", "TEXT")
conversation_options = (
    text("--system", "System message for --chat.", "TEXT"),
    file("--messages", "Conversation: JSON list of messages with role and content."),
)


def tools_group(default: str) -> Any:
    """Declare the options that describe tools.

    The help shows ``default`` as the default value of ``--tool-choice``.
    """
    choices = "required, or a function's name"
    return group(
        "Tools",
        file("--tools", "Functions that may be called: JSON list, in OpenAI's format."),
        text(
            "--tool-choice",
            f"{'auto, none, ' * (default == 'auto')}{choices}.  [default: {default}]",
        ),
        flag("--parallel-tool-calls", help="Allow several function calls in one answer."),
        choice(
            "--call-format",
            CALL_FORMATS,
            "object, list, lines, tool_call, gemma.  [default: the bundle's]",
        ),
    )


def take_conversation(values: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Remove the message options from a command's values, and return the list of messages.

    Returns ``None`` if the user gave no message.
    """
    chat, system, messages = (values.pop(name) for name in ("chat", "system", "messages"))
    if chat is not None and messages is not None:
        raise click.UsageError("give one of --chat and --messages")
    if system is not None and chat is None:
        raise click.UsageError(
            "--system needs --chat; in --messages, write a message with role system"
        )
    if messages is not None:
        found = read_json_file(messages)
        if not isinstance(found, list):
            raise RequestError(f"{messages}: not a list of messages")
        return found
    return None if chat is None else _messages(system, [{"role": "user", "content": chat}])


def take_tools(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the tool options from a command's values, and return them as request options."""
    found = {name: value for name in _TOOL_OPTIONS if (value := values.pop(name)) is not None}
    if values.pop("parallel_tool_calls"):
        found["parallel_tool_calls"] = True
    if "tools" in found:
        found["tools"] = read_json_file(found["tools"])
    return found


def _messages(system: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return messages if system is None else [{"role": "system", "content": system}, *messages]


@command()
@click.argument("bundle", type=CHECKPOINT)
@options(
    group(
        "Common options",
        text("--system", "System message before the conversation.", "TEXT"),
        number("--max-new-tokens", "Most tokens per answer.  [default: the bundle's, or 128]"),
        preset_option,
        effort_option,
        set_option,
        prompt_cache_option,
    ),
    opening_group,
)
@click.pass_context
def chat(
    context: click.Context,
    /,
    bundle: Path,
    system: str | None,
    max_new_tokens: int | None,
    preset: str | None,
    effort: str | None,
    changes: tuple[str, ...],
    **values: Any,
) -> None:
    """Chat with BUNDLE, and watch its canvas. Ctrl-C ends an answer, /quit or Ctrl-D ends the chat.

    If stdin or stdout is not a terminal, each line of stdin is a message, and the answers go to
    stdout. If a message fails, the error is written to stderr, and the exit code is 2.

    Some chat templates, such as the demo's, accept only one message. With such a template, earlier
    messages are ignored.

    \b
    Example: dlm-export chat build/demo
    Piped:   printf 'turn off the kitchen lights\\nplay jazz\\n' | dlm-export chat build/demo
    """
    request = {"preset": preset, "max_new_tokens": max_new_tokens} | policy_changes(changes)
    how = replace(opening(values), prefix_cache_bytes=KEPT_BYTES)
    with how.open(bundle) as opened:
        talk = Conversation(opened, request)
        talk.take_system(system)
        talk.take_effort(effort)
        if sys.stdin.isatty() and sys.stdout.isatty():
            _in_terminal(talk)
        else:
            failed = _in_lines(talk)
            if failed is not None:
                context.exit(failed.exit_code)


class Conversation:
    """A conversation: all messages so far, and the settings for the next answer."""

    def __init__(self, bundle: Bundle, request: dict[str, Any]) -> None:
        if bundle.tokenizer is None or bundle.tokenizer.template is None:
            raise RequestError(
                "this bundle has no chat template: use `dlm-export run` with --prompt"
            )
        self.bundle, self.request, self.tokenizer = bundle, request, bundle.tokenizer
        self.system: str | None = None
        self.messages: list[dict[str, Any]] = []
        # True if requests contain earlier messages; False if the chat template accepts only one
        # message.
        self.remembers = True
        # An event that ends the current answer when it is set.
        self.running: threading.Event | None = None

    def take_system(self, system: str | None) -> None:
        """Set the system message for all later answers.

        Raises RequestError if the chat template does not support system messages.
        """
        self.tokenizer.encode_chat(_messages(system, [{"role": "user", "content": "-"}]))
        self.system = system

    def take_effort(self, level: str | None) -> None:
        """Set the effort level for all later answers. ``None`` means the preset without a level.

        Raises RequestError if the bundle has no such level.
        """
        self.bundle.policy(self.request["preset"], level)
        self.request["effort"] = level

    def interrupt(self) -> bool:
        """End the current answer. Returns False if no answer is being generated."""
        if self.running is None:
            return False
        self.running.set()
        return True

    def ask(self, text: str, show: Callable[[dict[str, Any], int], Generation]) -> Generation:
        """Answer the message ``text``, and add the message and the answer to the conversation.

        The callback ``show`` generates the answer. Its arguments are the request and the position
        of the answer's first token. Raises RequestError if the conversation fills the canvas.
        """
        said, given = self._next(text)
        if given >= self.bundle.max_canvas_length:
            raise RequestError(
                f"the conversation of {given} tokens fills the canvas of {self.bundle.max_canvas_length}: /reset clears it"
            )
        self.running = threading.Event()
        new = {"chat": _messages(self.system, said), "cancel": self.running}
        try:
            answer = show(self.request | new, given)
        finally:
            self.running = None
        self.messages = [*said, {"role": "assistant", "content": answer.text or ""}]
        return answer

    def _next(self, text: str) -> tuple[list[dict[str, Any]], int]:
        """Return the messages for the next request, and their total number of tokens.

        The next request contains all messages so far and the new message. If the chat template
        rejects earlier messages, the request contains only the new message.
        """
        message = {"role": "user", "content": text}
        if self.messages and self.remembers:
            said = [*self.messages, message]
            try:
                return said, len(self.tokenizer.encode_chat(_messages(self.system, said)))
            except RequestError as err:
                given = len(self.tokenizer.encode_chat(_messages(self.system, [message])))
                warn(f"{err}. From now on, each message is answered without the earlier ones")
                self.remembers = False
                return [message], given
        return [message], len(self.tokenizer.encode_chat(_messages(self.system, [message])))

    def command(self, line: str) -> str | None:
        """Execute a command of the user, such as /reset. Returns a message for the user.

        Returns ``None`` if the command ends the conversation.
        """
        name, _, rest = line.partition(" ")
        said = rest.strip() or None
        if name == "/quit":
            return None
        if name == "/reset":
            self.messages = []
            return "Forgotten."
        if name == "/system":
            self.take_system(said)
            return "No system message." if said is None else "The system message is changed."
        if name == "/effort":
            self.take_effort(said)
            return f"Effort: {said or 'the preset'}."
        return (
            "/reset clears the conversation. /system TEXT and /effort LEVEL set these; "
            "without a value they clear them. /quit ends."
        )


def _in_lines(talk: Conversation) -> DlmError | None:
    """Answer each line of stdin on stdout, even after failures. Returns the first error."""
    first: DlmError | None = None
    with interrupted_by(talk.interrupt):
        for number, line in enumerate(map(str.strip, sys.stdin), 1):
            try:
                if line.startswith("/"):
                    told = talk.command(line)
                    if told is None:
                        return first
                    click.echo(told, err=True)
                elif line:
                    answer = talk.ask(line, lambda request, _: talk.bundle.generate(**request))
                    print_text(answer.text or "")
            except DlmError as err:
                click.echo(f"Error: line {number}: {one_line(err)}", err=True)
                first = first or err
    return first


def _in_terminal(talk: Conversation) -> None:
    """Read the messages that the user types at a prompt, and show the canvas of each answer."""
    from rich.console import Console

    console = Console()

    def interrupt() -> bool:
        if not talk.interrupt():
            raise KeyboardInterrupt  # discard the line that the user is typing
        return True

    click.echo(f"{one_line(talk.bundle.engine)}. Ctrl-C ends an answer, /help lists commands.")
    with interrupted_by(interrupt):
        for line in _typed():
            try:
                if line.startswith("/"):
                    told = talk.command(line)
                    if told is None:
                        return
                    click.echo(told)
                else:
                    _answer(talk, line, console)
            except DlmError as err:
                click.echo(f"Error: {one_line(err)}", err=True)
            except KeyboardInterrupt:
                click.echo()


def _typed() -> Iterator[str]:
    """Yield each line that the user types, until Ctrl-D. Empty lines are skipped."""
    import readline  # noqa: F401  # lets the user edit the line in input()

    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            click.echo()
            continue
        except EOFError:
            click.echo()
            return
        if line:
            yield line


def _answer(talk: Conversation, line: str, console: Console) -> None:
    from dlm_export.cli.watch import denoise

    answer = talk.ask(
        line, lambda request, start: denoise(talk.bundle, request, console, shown_from=start)
    )
    print_text(answer.text or "")
    click.secho(f"[{how_it_went(answer)}]", fg="bright_black")
