"""Conversations: messages and tools as options, and ``chat``, which holds one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlm_export.cli.options import (
    CHECKPOINT,
    FILE,
    OPENING_OPTIONS,
    effort_option,
    options,
    preset_option,
    set_option,
)
from dlm_export.cli.printing import for_terminal, how_it_went, one_line, warn
from dlm_export.cli.values import opening, policy_changes, read_json_file
from dlm_export.signals import interrupted_by
from dlm_runtime import Bundle, DlmError, Generation, RequestError

if TYPE_CHECKING:
    from rich.console import Console

_TOOL_OPTIONS = {"tools": "--tools", "tool_choice": "--tool-choice", "call_format": "--call-format"}


def conversation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The messages before the answer, and the functions that may be called."""
    own = (
        click.option("--chat", help="A user's message, put through the bundle's chat template."),
        click.option("--system", help="System message for --chat."),
        click.option(
            "--messages",
            type=FILE,
            metavar="FILE",
            help="A conversation: JSON list of messages with role and content.",
        ),
    )
    return options(own)(tool_options("auto")(command))


def tool_options(choice: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options that describe tools. ``choice``: the default of ``--tool-choice`` in the help."""
    choices = (
        "auto, required, none, or a function's name"
        if choice == "auto"
        else "required, or a function's name"
    )
    return options(
        (
            click.option(
                "--tools",
                type=FILE,
                metavar="FILE",
                help="Functions that may be called: JSON list, as OpenAI has it.",
            ),
            click.option("--tool-choice", help=f"{choices}.  [default: {choice}]"),
            click.option(
                "--parallel-tool-calls", is_flag=True, help="Several calls may be made at once."
            ),
            click.option(
                "--call-format", help="object, list, lines or tool_call.  [default: the bundle's]"
            ),
        )
    )


def take_conversation(values: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Takes the options of messages out of a command's values; None where none was given."""
    chat, system, messages = (values.pop(name) for name in ("chat", "system", "messages"))
    if chat is not None and messages is not None:
        raise click.UsageError("give one of --chat and --messages")
    if system is not None and chat is None:
        raise click.UsageError(
            "--system is of --chat; in --messages it is a message of role system"
        )
    if messages is not None:
        found = read_json_file(messages)
        if not isinstance(found, list):
            raise RequestError(f"{messages}: not a list of messages")
        return found
    return None if chat is None else _messages(system, [{"role": "user", "content": chat}])


def take_tools(values: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of tools out of a command's values: what a request is given of them."""
    found = {name: value for name in _TOOL_OPTIONS if (value := values.pop(name)) is not None}
    if values.pop("parallel_tool_calls"):
        found["parallel_tool_calls"] = True
    if "tools" in found:
        found["tools"] = read_json_file(found["tools"])
    return found


def warn_of_length(bundle: Bundle, new_tokens: int | None) -> None:
    """Warn on stderr of an answer longer than those that the bundle says its denoiser gives.

    A denoiser with full attention sees all of the room from its first pass on. In more room than it
    was trained with, it often ends its text too early.
    """
    usual = bundle.manifest["loop"].get("max_new_tokens")
    if (
        new_tokens is not None
        and usual is not None
        and new_tokens > usual
        and bundle.visible_block is None
    ):
        warn(
            f"--max-new-tokens {new_tokens} is more than the {usual} that this bundle names: the text may end too soon"
        )


def _messages(system: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return messages if system is None else [{"role": "system", "content": system}, *messages]


@click.command()
@click.argument("bundle", type=CHECKPOINT)
@click.option("--system", help="What the denoiser shall keep to.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    help="Most mask tokens an answer.  [default: as the bundle says, or 128]",
)
@preset_option
@effort_option
@set_option
@options(OPENING_OPTIONS)
def chat(
    bundle: Path,
    system: str | None,
    max_new_tokens: int | None,
    preset: str | None,
    effort: str | None,
    changes: tuple[str, ...],
    **values: Any,
) -> None:
    """Talk to a bundle; the canvas is shown as it denoises. Ctrl-C ends an answer, /quit or Ctrl-D
    the conversation.

    If stdin or stdout is not a terminal, each line is a message, and each answer is printed as it
    is. A bundle whose chat template takes no earlier messages, such as the demo's, answers each
    message by itself.

    Example: dlm-export chat build/demo --preset fast-dllm
    """
    request = {"preset": preset} | policy_changes(changes)
    with opening(values).open(bundle) as opened:
        talk = Conversation(
            opened, {"max_new_tokens": max_new_tokens or opened.max_new_tokens} | request
        )
        warn_of_length(opened, max_new_tokens)
        talk.take_system(system)
        talk.take_effort(effort)
        if sys.stdin.isatty() and sys.stdout.isatty():
            _in_terminal(talk)
        else:
            _in_lines(talk)


class Conversation:
    """What was said so far, and how the next answer is made."""

    def __init__(self, bundle: Bundle, request: dict[str, Any]) -> None:
        if bundle.tokenizer is None or bundle.tokenizer.template is None:
            raise RequestError(
                "this bundle has no chat template, so that nobody can talk to it: `dlm-export run` takes a prompt"
            )
        self.bundle, self.request, self.tokenizer = bundle, request, bundle.tokenizer
        self.system: str | None = None
        self.messages: list[dict[str, Any]] = []
        self.remembers = True  # whether the template takes earlier messages
        self.running: threading.Event | None = None  # what ends the answer that is being made

    def take_system(self, system: str | None) -> None:
        """Say from now on what stands in front of all messages. Raises RequestError where the
        template takes none.
        """
        self.tokenizer.encode_chat(_messages(system, [{"role": "user", "content": "-"}]))
        self.system = system

    def take_effort(self, level: str | None) -> None:
        """Change the effort of later answers; None: back to the preset. Raises RequestError."""
        self.bundle.policy(self.request["preset"], level)
        self.request["effort"] = level

    def interrupt(self) -> bool:
        """End the answer that is being made; False: there is none."""
        if self.running is None:
            return False
        self.running.set()
        return True

    def ask(self, text: str, show: Callable[[dict[str, Any], int], Generation]) -> Generation:
        """An answer to a message, made by ``show`` from a request and where on the canvas it
        starts.

        Both become part of the conversation. Raises RequestError if it fills the canvas.
        """
        said, given = self._next(text)
        room = self.bundle.max_canvas_length - given
        if room < 1:
            raise RequestError(
                f"the conversation of {given} tokens fills the canvas of {self.bundle.max_canvas_length}: /reset forgets it"
            )
        wanted = self.request["max_new_tokens"]
        if room < wanted:
            warn(
                f"the conversation of {given} tokens leaves {room} for this answer, not {wanted}: /reset forgets it"
            )
        new = {"chat": _messages(self.system, said), "max_new_tokens": min(wanted, room)}
        self.running = threading.Event()
        try:
            answer = show(self.request | new | {"cancel": self.running}, given)
        finally:
            self.running = None
        self.messages = [*said, {"role": "assistant", "content": answer.text or ""}]
        return answer

    def _next(self, text: str) -> tuple[list[dict[str, Any]], int]:
        """The messages up to this one, and their tokens. If the template rejects earlier messages,
        they are left out.
        """
        message = {"role": "user", "content": text}
        if self.messages and self.remembers:
            said = [*self.messages, message]
            try:
                return said, len(self.tokenizer.encode_chat(_messages(self.system, said)))
            except RequestError as err:
                given = len(self.tokenizer.encode_chat(_messages(self.system, [message])))
                warn(f"{err}. Each message is answered by itself from now on")
                self.remembers = False
                return [message], given
        return [message], len(self.tokenizer.encode_chat(_messages(self.system, [message])))

    def command(self, line: str) -> str | None:
        """Do what a line that starts with / says, and describe it; None ends the conversation."""
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
        return "/reset forgets what was said, /system TEXT and /effort LEVEL change it (alone: none), /quit ends."


def _in_lines(talk: Conversation) -> None:
    """A message a line of stdin, and its answer on stdout; what commands say goes to stderr."""
    with interrupted_by(talk.interrupt):
        for line in map(str.strip, sys.stdin):
            if line.startswith("/"):
                told = talk.command(line)
                if told is None:
                    return
                click.echo(told, err=True)
            elif line:
                click.echo(talk.ask(line, lambda request, _: talk.bundle.generate(**request)).text)


def _in_terminal(talk: Conversation) -> None:
    """A prompt, and the canvas of each answer while it is made."""
    from rich.console import Console

    console = Console()

    def interrupt() -> bool:
        if not talk.interrupt():
            raise KeyboardInterrupt  # at the prompt: another line
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
    """Lines typed at a prompt that are not empty, until Ctrl-D."""
    import readline  # noqa: F401  # gives input() its editing keys

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
    click.echo(for_terminal(answer.text or ""))
    click.secho(f"[{how_it_went(answer)}]", fg="bright_black")
