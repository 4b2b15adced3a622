"""The command line: `megatron-dppo train | evaluate | convert | plot | report | plan | doctor`.

Heavy imports happen inside the commands, and others than launch's within `exit_status`: Ctrl-C is one line from the
first second on.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_dppo import __version__
from megatron_dppo.errors import UserError
from megatron_dppo.launch import exit_status
from megatron_dppo.launch.imports import ignore_warnings_of_libraries, uncollected

_OVERRIDE = re.compile(
    r"(seed|(run|model|lora|parallel|actor|optimizer|algorithm|rollout|task|trainer|evaluation|tracking)\.[^=]+)="
)
"""What tells `evaluation.samples=4`, and what belongs to a run alone, from the data `aime24=aime24.jsonl`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code; what a user can act on is one line on stderr (`launch.exit_status`)."""

    def run() -> int:
        arguments = _parse(argv)
        return int(arguments.run(arguments) or 0)

    return exit_status(run)


class _Parser(argparse.ArgumentParser):
    """Its errors end a rank as others do, with the reason on the launcher's last line."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise UserError(message)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes the words that may be any number (`a.b=c`) in one place only; those behind an option belong to
    them just as well."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        lists = [name for name in ("overrides", "data", "model") if isinstance(getattr(arguments, name, None), list)]
        if not lists or any(one.startswith("-") for one in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        if lists[0] == "overrides" and arguments.config is None and "=" not in rest[0]:
            arguments.config = Path(rest.pop(0))  # `doctor --gpu RUN.yaml`
        getattr(arguments, lists[0]).extend(rest)
    return arguments


def _parser() -> argparse.ArgumentParser:
    from megatron_dppo.checkpoint.convert_arguments import add_convert_arguments, run_convert
    from megatron_dppo.doctor.command import add_doctor_arguments, run_doctor
    from megatron_dppo.planner.command import add_plan_arguments, run_plan

    parser = _Parser(prog="megatron-dppo", description="Reinforcement learning of MoE models with DPPO.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str,
        add_arguments: Callable[[argparse.ArgumentParser], None],
        run: Callable[[argparse.Namespace], int],
        help: str,
        description: str | None = None,
    ) -> None:
        one = commands.add_parser(name, help=help, description=description)
        add_arguments(one)
        one.set_defaults(run=run)

    # A model.
    command(
        "train",
        _add_train_arguments,
        _train,
        "train a model (start with torchrun)",
        "Train as CONFIG says: torchrun --nproc-per-node N --no-python megatron-dppo train CONFIG ...",
    )
    command(
        "evaluate",
        _add_evaluate_arguments,
        _evaluate,
        "avg@n and pass@k of a model on files of questions",
        "Sample answers and score them: megatron-dppo evaluate MODEL [NAME=]FILE ... [a.b=c ...]. "
        "Without --config the sampling is temperature 0.7, top-p 0.95, 32 answers per question. Started again with the "
        "same --out, it goes on where it was.",
    )
    command(
        "convert", add_convert_arguments, run_convert, "convert a checkpoint between Hugging Face and Megatron-Core"
    )
    # A cluster, a machine, a configuration.
    command(
        "plan",
        add_plan_arguments,
        run_plan,
        "say what fits on a cluster, and how fast it will be",
        "Memory, time and traffic of training a model on GPUs that need not be there yet.",
    )
    command(
        "doctor",
        add_doctor_arguments,
        run_doctor,
        "say what is wrong with this machine or a configuration",
        "One line per finding, with the fix; where all is well only what begins with `ok`: the sandbox, a measured "
        "bandwidth, the memory that CONFIG needs. Exit status 1 after an error.",
    )
    # Runs that were.
    command("plot", _add_plot_arguments, _plot, "draw the training curves of one or several runs, or objectives")
    command("report", _add_report_arguments, _report, "write one HTML page about one or several runs")
    command(
        "show",
        _add_show_arguments,
        _show,
        "write one HTML page about one answer or episode of a run, token by token",
    )
    return parser


def _add_train_arguments(train: argparse.ArgumentParser) -> None:
    train.add_argument("config", type=Path, help="YAML file")
    train.add_argument("overrides", nargs="*", default=[], metavar="a.b=c", help="config keys to change")
    train.add_argument(
        "--check", action="store_true", help="only check CONFIG and the overrides, in seconds; `doctor` finds more"
    )


def _add_evaluate_arguments(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument("model", type=Path, help="folder of a Hugging Face checkpoint")
    evaluate.add_argument(
        "data",
        nargs="*",
        default=[],
        metavar="DATA",
        help="file, folder or hub dataset, as task.data.path; and a.b=c overrides",
    )
    evaluate.add_argument("--config", type=Path, help="YAML file of a run: its rollout, task and evaluation sections")
    evaluate.add_argument(
        "-o", "--out", type=Path, help="folder for the answers (default: evaluation/ and MODEL's name)"
    )
    evaluate.add_argument(
        "--keep",
        nargs=2,
        type=float,
        metavar=("FROM", "TO"),
        help="write the questions whose fraction of right answers lies there to OUT/NAME.kept.jsonl, to train on",
    )


def _add_plot_arguments(plot: argparse.ArgumentParser) -> None:
    plot.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl")
    plot.add_argument("-o", "--output", type=Path, default=Path("curves.png"), help="PNG to write (%(default)s)")
    plot.add_argument("--title", default="")
    plot.add_argument("--time", action="store_true", help="curves over the time that steps took, not over their number")
    instead = plot.add_mutually_exclusive_group()
    instead.add_argument(
        "--mismatch", action="store_true", help="trainer against engine before any update (Figure 2) instead of curves"
    )
    instead.add_argument(
        "--masked", action="store_true", help="probability and entropy of masked tokens (Figure 6) instead of curves"
    )
    instead.add_argument(
        "--objective",
        nargs="+",
        metavar="PRESET",
        help="objective and mask over the ratio pi / mu (Figure 1, left) of presets, each PRESET or PRESET:CONSTANTS; "
        "needs no run",
    )
    plot.add_argument(
        "--mu",
        nargs="+",
        type=float,
        default=[0.01, 0.5, 0.95],
        metavar="P",
        help="rollout probabilities that --objective draws (0.01 0.5 0.95)",
    )


def _add_report_arguments(report: argparse.ArgumentParser) -> None:
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    report.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="file to write (%(default)s)")
    report.add_argument("--title", default="")


def _add_show_arguments(show: argparse.ArgumentParser) -> None:
    show.add_argument("folder", type=Path, metavar="RUN", help="folder of a run")
    show.add_argument(
        "--episode", type=int, help="its number in its step, as in samples.jsonl (the first that was kept)"
    )
    show.add_argument("--step", type=int, help="training step (the last that kept some)")
    show.add_argument("-o", "--output", type=Path, help="file to write (step-S-episode-N.html)")


def _train(arguments: argparse.Namespace) -> int:
    ignore_warnings_of_libraries()
    with uncollected():
        from megatron_dppo.config.load import load_config
    config = load_config(arguments.config, arguments.overrides)
    if arguments.check:
        from megatron_dppo.preflight.finding import raise_first
        from megatron_dppo.preflight.rules import check_sections

        raise_first(check_sections(config))
        return 0
    with uncollected():
        from megatron_dppo.trainer.train import train
    return train(config)


def _evaluate(arguments: argparse.Namespace) -> int:
    with uncollected():
        from megatron_dppo.trainer.evaluate_model import evaluate_config, evaluate_model

    overrides = [one for one in arguments.data if _OVERRIDE.match(one)]
    data = [one for one in arguments.data if not _OVERRIDE.match(one)]
    out = arguments.out or Path("evaluation") / arguments.model.resolve().name
    keep = tuple(arguments.keep) if arguments.keep else None
    return evaluate_model(arguments.model, evaluate_config(data, arguments.config, overrides), out, keep=keep)


def _labelled(runs: Sequence[Path]) -> dict[str, Path]:
    """Runs by the names of their folders, or by their paths where two are named alike."""
    labels = [run.resolve().parent.name if run.is_file() else run.resolve().name for run in runs]
    if len(set(labels)) < len(labels):
        labels = [str(run) for run in runs]
    return dict(zip(labels, runs, strict=True))


def _folders(runs: Sequence[Path]) -> dict[str, Path]:
    return {label: run.parent if run.is_file() else run for label, run in _labelled(runs).items()}


def _report(arguments: argparse.Namespace) -> int:
    from megatron_dppo.trainer.report import write_report

    write_report(_folders(arguments.runs), arguments.output, title=arguments.title)
    print(arguments.output)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from megatron_dppo.trainer.episode_page import show_episode

    print(show_episode(arguments.folder, arguments.output, episode=arguments.episode, step=arguments.step))
    return 0


def _plot(arguments: argparse.Namespace) -> int:
    from megatron_dppo.trainer.history import History
    from megatron_dppo.trainer.mismatch import Mismatch
    from megatron_dppo.trainer.mismatch_plot import plot_mismatch
    from megatron_dppo.trainer.plots import MASKED_PANELS, plot_objectives, plot_runs

    runs, output, title = arguments.runs, arguments.output, arguments.title
    if arguments.time and (arguments.objective or arguments.mismatch):
        raise UserError("plot: --time is for curves and --masked; leave it out")
    if arguments.objective:
        if runs:
            raise UserError(f"plot: --objective draws presets, not runs ({runs[0]}); leave one of them out")
        plot_objectives(arguments.objective, arguments.mu, output, title=title)
    elif arguments.mismatch:
        plot_mismatch({label: Mismatch.read(run) for label, run in _folders(runs).items()}, output, title=title)
    else:
        histories = {label: History.read(run) for label, run in _labelled(runs).items()}
        panels = MASKED_PANELS if arguments.masked else None
        plot_runs(histories, output, title=title, panels=panels, by_time=arguments.time)
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
