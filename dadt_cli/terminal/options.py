"""Makes command-line options for all settings, from the fields of Config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from dadt.config import Config
from dadt.config.check import COMPRESSIONS, flag, variable
from dadt.config.config import given_by_env
from dadt.config.extensions import ALGORITHMS, EXECUTORS
from dadt.config.spelling import HOROVOD_TIMELINE, HOROVODRUN, by_horovod
from dadt.launch.start.resume import LAST
from dadt_cli.terminal import file, suggestion
from dadt_cli.terminal.file import DEFAULT, Setting

F = TypeVar("F", bound=Callable[..., Any])
Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

SUGGESTED = {
    "algorithm": ALGORITHMS,
    "executor": ("auto", *EXECUTORS),
    "broadcast_executor": ("auto", *EXECUTORS),
    "allreduce_executor": ("auto", *EXECUTORS),
    "compression": COMPRESSIONS,
    "output": ("once", "all", "rank0", "errors"),
}
"""Values that shells complete for settings that also accept other values."""


class Option(click.Option):
    """An option whose help omits the spelling that horovodrun uses."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the names of the option, without horovodrun's spelling, and its help text."""
        names = self.opts
        self.opts = [name for name in names if name not in HOROVODRUN.values()]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = names


class Brief(click.Command):
    """A command with a short --help that fits on a screen; --help-all also shows hidden options and the epilog."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._all = False
        flag: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
        self.params.append(click.Option(["--help-all"], callback=self._help_all, help="Show all options.", **flag))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Accepts `-np2` for `-np 2`; for an unknown flag, such as a flag of another launcher, the
        error names the flag to use instead."""
        try:
            found, following, _ = self.make_parser(ctx).parse_args(list(args))
        except click.NoSuchOption as error:
            known = [name for each in self.params for name in (*each.opts, *each.secondary_opts)]
            if hint := suggestion.instead(error.option_name, args, known):
                raise click.UsageError(f"{error.option_name}: there is no such flag; {hint}", ctx) from error
            if self.name == "run" and (hint := suggestion.slip(error.option_name, args, known)):
                raise click.UsageError(f"{error.option_name}: dadt run has no such flag; {hint}", ctx) from error
            raise
        if hint := suggestion.elastic(str(found.get("nnodes", ""))):
            raise click.UsageError(hint, ctx)
        mine = len(args) - len(following)
        return super().parse_args(ctx, [*suggestion.without_space(args[:mine]), *args[mine:]])

    def _help_all(self, ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            self._show_all()
            click.echo(ctx.get_help())
            ctx.exit()

    def _show_all(self) -> None:
        self._all = True
        for each in self.params:
            if isinstance(each, click.Option):
                each.hidden = False

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self._all:
            super().format_epilog(ctx, formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete options, including hidden ones if the word has a letter after its dashes. Nothing is completed after
        the script, which has its own options."""
        arguments = [each for each in self.params if isinstance(each, click.Argument)]
        if not ctx.allow_interspersed_args and any(ctx.params.get(each.name or "") for each in arguments):
            return []
        if incomplete.lstrip("-"):
            self._show_all()
        return [item for item in super().shell_complete(ctx, incomplete) if item.value not in HOROVODRUN.values()]


def paths(kind: str) -> Completion:
    """Return a function that completes names of files or folders. kind: `file` or `dir`."""
    return lambda ctx, parameter, incomplete: [CompletionItem(incomplete, type=kind)]


def knobs(function: F) -> F:
    """Decorate a command with one flag per setting (knob). A flag that the user does not give is passed as None."""
    for field in sorted(fields(Config), key=lambda field: not field.metadata["launch"])[::-1]:
        function = _option(field)(function)
    function = click.option("--no-horovod", is_flag=True, hidden=True, help="As --horovod none.")(function)
    return _config_file(function)


def some_knobs(*names: str) -> Callable[[F], F]:
    """Decorate a command with one flag for each of the named settings. All other settings come from variables and the
    settings file."""

    def decorate(function: F) -> F:
        for field in [field for field in fields(Config) if field.name in names][::-1]:
            function = _option(field)(function)
        return _config_file(function)

    return decorate


def _config_file(function: F) -> F:
    return click.option(
        "--config", metavar="FILE", help="YAML file of settings; flags, variables win.", shell_complete=paths("file")
    )(function)


def config_of(given: dict[str, Any]) -> Config:
    """Build the configuration. A flag has priority over a DADT_* variable, which has priority over the file that
    --config names, which has priority over the defaults.

    Raises ConfigError if a value is wrong.
    """
    return Config(**{name: setting.value for name, setting in settings_of(given).items()})


def settings_of(given: Mapping[str, Any], variables: bool = True) -> dict[str, Setting]:
    """Return each setting's value and source. variables: whether DADT_* variables count. Raises ConfigError if a value
    is wrong."""
    settings = {field.name: Setting(field.default, DEFAULT) for field in fields(Config)}
    if given.get("config"):
        settings.update(file.read(Path(given["config"])))
    horovods = by_horovod()
    for name, value in given_by_env().items() if variables else ():
        settings[name] = Setting(value, HOROVOD_TIMELINE if horovods.get(name) == value else variable(name))
    for name in settings:
        if given.get(name) not in (None, ()):
            # Hosts may be given by several flags, whose values together form one list.
            several = isinstance(given[name], tuple) and isinstance(settings[name].value, str)
            settings[name] = Setting(",".join(given[name]) if several else given[name], flag(name))
    if given.get("no_horovod"):
        settings["horovod"] = Setting("none", "--no-horovod")
    elif settings["horovod"].source == DEFAULT != settings["algorithm"].source:
        settings["horovod"] = settings["algorithm"]
    return settings


def _option(field: Field[Any]) -> Callable[[F], F]:
    name = flag(field.name)
    # Short names such as -np and -x come first, followed by the name of the setting as a long flag.
    names = [*field.metadata["flags"], name]
    shown = _shown(field.default)
    text = field.metadata["help"] + (f"  [default: {shown}]" if shown else "")
    options: dict[str, Any] = {"default": None, "help": text, "hidden": field.metadata["advanced"], "cls": Option}
    if field.name in HOROVODRUN:
        names.append(HOROVODRUN[field.name])
    if field.name == "resume":  # `--resume` without a value means the last job
        options |= {"is_flag": False, "flag_value": LAST}
    if completion := _completion(field):
        options["shell_complete"] = completion
    if isinstance(field.default, tuple) or field.metadata["metavar"] == "HOSTS":
        return click.option(*names, field.name, multiple=True, metavar=_metavar(field), **options)
    if isinstance(field.default, bool):
        return click.option(*field.metadata["flags"], f"{name}/--no-{name[2:]}", field.name, **options)
    if field.metadata["choices"]:
        return click.option(*names, field.name, type=click.Choice(field.metadata["choices"]), **options)
    return click.option(*names, field.name, type=type(field.default), metavar=_metavar(field), **options)


def _completion(field: Field[Any]) -> Completion | None:
    if field.name in SUGGESTED:
        return lambda ctx, parameter, incomplete: [
            CompletionItem(value) for value in SUGGESTED[field.name] if value.startswith(incomplete)
        ]
    if field.metadata["metavar"] in ("FILE", "PATH", "DIR"):
        return paths("dir" if field.metadata["metavar"] == "DIR" else "file")
    return None


def _metavar(field: Field[Any]) -> str:
    names = {int: "N", float: "X", str: "TEXT", tuple: "TEXT"}
    return field.metadata["metavar"] or names[type(field.default)]


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, float):
        return f"{default:g}"
    return str(default) if default else ""
