"""`quire completion`: scripts that complete commands, options and their values in a shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.cli._command import add_command, add_json_argument, write_json

if TYPE_CHECKING:
    from quire.cli._command import Subparsers

_EXAMPLES = """
quire completion bash > ~/.local/share/bash-completion/completions/quire
quire completion zsh > "${fpath[1]}/_quire"
quire completion fish > ~/.config/fish/completions/quire.fish
"""
SHELLS = ("bash", "zsh", "fish")


def add_completion(commands: Subparsers) -> None:
    """Add `quire completion`."""
    summary = "print a script that completes commands and options in bash, zsh or fish"
    parser = add_command(commands, "completion", summary, _EXAMPLES, run)
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> None:
    """Print the script."""
    from quire.cli._main import make_parser  # noqa: PLC0415 - it imports this module by name

    commands = read_commands(make_parser())
    writers = {"bash": write_bash, "zsh": write_zsh, "fish": write_fish}
    script = writers[options.shell](commands)
    if options.json:
        write_json({"shell": options.shell, "script": script})
    else:
        sys.stdout.write(script)


@dataclass(frozen=True)
class Option:
    """An option of a command: its names, its help, and its values, if it takes one."""

    names: tuple[str, ...]
    help: str
    values: tuple[str, ...] | None
    """The choices; empty for any value; None for a flag."""


@dataclass(frozen=True)
class Command:
    """A command with its options, and the choices of its first argument if there are some."""

    name: str
    help: str
    options: tuple[Option, ...]
    arguments: tuple[str, ...]


def read_commands(parser: argparse.ArgumentParser) -> list[Command]:
    """Return the commands of a parser. argparse has no public way to list them."""
    [subparsers] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    summaries = {action.dest: action.help or "" for action in subparsers._choices_actions}
    return [
        Command(name, summaries[name], tuple(_read_options(command)), tuple(_read_choices(command)))
        for name, command in subparsers.choices.items()
    ]


def _read_options(parser: argparse.ArgumentParser) -> Iterator[Option]:
    for action in parser._actions:
        if action.option_strings:
            values = None if action.nargs == 0 else tuple(map(str, action.choices or ()))
            text = (action.help or "") % {"default": action.default, "prog": parser.prog}
            yield Option(tuple(action.option_strings), text, values)


def _read_choices(parser: argparse.ArgumentParser) -> Iterator[str]:
    first = next((action for action in parser._actions if not action.option_strings), None)
    return map(str, (first.choices or ()) if first is not None else ())


# --- scripts


def write_bash(commands: list[Command]) -> str:
    """Return a script for bash 3.2 or newer; words that have no choices complete to files."""
    cases = []
    for command in commands:
        names = [name for option in command.options for name in option.names]
        values = [
            f"          {'|'.join(option.names)}) {_offer(option.values)}; return ;;"
            for option in command.options
            if option.values
        ]
        arguments = _offer(command.arguments) if command.arguments else ":"
        cases += [
            f"      {command.name})",
            *(['        case "$previous" in', *values, "        esac"] if values else []),
            '        if [[ "$word" == -* ]]; then',
            f"          {_offer(names)}",
            "        else",
            f"          {arguments}",
            "        fi ;;",
        ]
    names = [*(command.name for command in commands), "--help", "--version"]
    lines = [
        "# bash completion for quire; written by `quire completion bash`",
        "_quire() {",
        '  local word="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
        "  COMPREPLY=()",
        '  if [[ "$COMP_CWORD" -eq 1 ]]; then',
        f"    {_offer(names)}",
        "  else",
        '    case "${COMP_WORDS[1]}" in',
        *cases,
        "    esac",
        "  fi",
        "}",
        "complete -o default -F _quire quire",
    ]
    return "\n".join(lines) + "\n"


def _offer(words: Iterable[str]) -> str:
    return f'COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word"))'


def write_zsh(commands: list[Command]) -> str:
    """Return a function for the `fpath` of zsh; it also works if it is sourced."""
    described = [f"    {_zsh_quote(f'{command.name}:{command.help}')}" for command in commands]
    cases = []
    for command in commands:
        specs = []
        for option in command.options:
            for name in option.names:
                value = (
                    ""
                    if option.values is None
                    else f":value:({' '.join(option.values)})"
                    if option.values
                    else ":value:_files"
                )
                specs.append(_zsh_quote(f"{name}[{_zsh_text(option.help)}]{value}"))
        specs.append(
            _zsh_quote(f"*:argument:({' '.join(command.arguments)})" if command.arguments else "*:file:_files")
        )
        cases += [
            f"    {command.name})",
            "      _arguments \\",
            *(f"        {spec} \\" for spec in specs),
            "        ;;",
        ]
    lines = [
        "#compdef quire",
        "# zsh completion for quire; written by `quire completion zsh`",
        "_quire() {",
        "  local -a commands",
        "  commands=(",
        *described,
        "  )",
        "  if (( CURRENT == 2 )); then",
        "    _describe 'command' commands",
        "    _arguments '--help[show the help]' '--version[show the version]'",
        "    return",
        "  fi",
        '  local command="$words[2]"',
        "  shift words",
        "  (( CURRENT-- ))",
        '  case "$command" in',
        *cases,
        "  esac",
        "}",
        'if [[ "$funcstack[1]" == _quire ]]; then _quire "$@"; else compdef _quire quire; fi',
    ]
    return "\n".join(lines) + "\n"


def _zsh_text(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in text)


def _zsh_quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def write_fish(commands: list[Command]) -> str:
    """Return a script for fish."""
    lines = ["# fish completion for quire; written by `quire completion fish`"]
    lines += [
        f"complete -c quire -f -n __fish_use_subcommand -l {name} -d {_fish_quote(text)}"
        for name, text in (("help", "show the help"), ("version", "show the version"))
    ]
    for command in commands:
        lines.append(f"complete -c quire -f -n __fish_use_subcommand -a {command.name} -d {_fish_quote(command.help)}")
        condition = f"-n '__fish_seen_subcommand_from {command.name}'"
        if command.arguments:
            lines.append(f"complete -c quire -f {condition} -a {_fish_quote(' '.join(command.arguments))}")
        for option in command.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            value = (
                ""
                if option.values is None
                else f" -x -a {_fish_quote(' '.join(option.values))}"
                if option.values
                else " -r"
            )
            lines.append(f"complete -c quire {condition} {names}{value} -d {_fish_quote(option.help)}")
    return "\n".join(lines) + "\n"


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
