"""`ratchet completion SHELL`: completion of commands and options, made from the parser itself."""

import argparse

SHELLS = ("bash", "zsh", "fish")


def words(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Command → its options, sorted."""
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {
        name: sorted(option for action in sub._actions for option in action.option_strings if option.startswith("--"))
        for name, sub in commands.choices.items()
    }


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script that a shell reads: `source <(ratchet completion bash)`."""
    table = words(parser)
    if shell == "fish":
        lines = [f"complete -c ratchet -f -n __fish_use_subcommand -a '{' '.join(table)}'"]
        for name, options in table.items():
            seen = f"__fish_seen_subcommand_from {name}"
            lines += [f"complete -c ratchet -n '{seen}' -l {option[2:]}" for option in options]
        return "\n".join(lines)
    cases = "\n".join(f'    {name}) words="{" ".join(options)}" ;;' for name, options in table.items())
    body = f"""_ratchet() {{
  local words current="${{COMP_WORDS[COMP_CWORD]}}"
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="" ;;
  esac
  [ "$COMP_CWORD" -eq 1 ] && words="{" ".join(table)}"
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _ratchet ratchet"""
    return f"autoload -U +X bashcompinit && bashcompinit\n{body}" if shell == "zsh" else body
