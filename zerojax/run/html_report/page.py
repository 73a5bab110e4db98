"""Rendering of a run's data as an HTML page."""

import json
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.resources import files
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from zerojax.formatting import abbreviated, percent, size
from zerojax.run.html_report.charts import Chart, Series, smoothed
from zerojax.run.html_report.run_data import RunData, finite
from zerojax.validation.bounds import is_time

RATES = ("tokens_per_second", "mfu")
"""Values per second. Their mean is the harmonic mean, the inverse of the mean time."""


def render(run: RunData) -> str:
    """The page as text.

    All values of the run are escaped, and the page loads nothing from outside itself.
    """
    environment = Environment(
        loader=PackageLoader("zerojax.run.html_report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["size"] = size
    page = environment.get_template("page.html").render(
        run=run,
        style=_asset("page.css"),
        script=_asset("page.js"),
        facts=_facts(run),
        chart=_main_chart(run),
        charts=_charts(run),
        sent=_communication(run),
        sessions=[_session(number, one, run.written) for number, one in enumerate(run.sessions, 1)],
        environment=_environment(run),
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        json=lambda value: json.dumps(value, separators=(",", ":")),
    )
    return page.encode(errors="replace").decode()  # JSON may contain halves of surrogate pairs


def _asset(name: str) -> Markup:
    """One of the package's own files, which needs no escaping."""
    return Markup(files("zerojax.run.html_report").joinpath(name).read_text(encoding="utf-8"))


def _facts(run: RunData) -> list[tuple[str, str, str]]:
    """The numbers at the top of the page: (name, value, remark)."""

    def last(name: str) -> float | None:
        return next(reversed(run.finite(name)), None)

    def typical(name: str) -> float | None:
        return statistics.median(values) if (values := run.finite(name)) else None

    facts: list[tuple[str, str, str]] = []
    if run.steps:
        planned = run.summary.get("steps") or run.config.get("train", {}).get("steps")
        facts.append(("steps", f"{run.steps[-1]:,}", f"of {planned:,}" if isinstance(planned, int) else ""))
    if (loss := last("loss")) is not None:
        facts.append(("training loss", f"{loss:.4f}", _loss_unit(run)))
    if (loss := last("validation_loss")) is not None:
        per_byte = finite(run.summary.get("validation_loss_per_byte"))
        remark = f"{per_byte:.4f} per byte" if run.status == "finished" and per_byte else _loss_unit(run)
        facts.append(("validation loss", f"{loss:.4f}", remark))
    others: list[tuple[str, float | None, Callable[[float], str], str]] = [
        ("accuracy", last("validation_accuracy"), percent, "of held-out pairs"),
        ("reward", last("reward"), "{:.3f}".format, "mean of the last rollout"),
        ("held-out reward", last("validation_reward"), "{:.3f}".format, "of greedy responses"),
        ("divergence", last("kl"), "{:.3g}".format, "from the first weights, per token"),
        ("exact match", last("exact_match"), percent, "of held-out prompts"),
        ("expert load", last("expert_load"), "{:.2f}".format, "busiest over the mean, worst layer"),
        ("tokens per second", typical("tokens_per_second"), abbreviated, "median step"),
        ("MFU", typical("mfu"), percent, "median step"),
        ("step time", typical("step_seconds"), _duration, "median"),
        ("sent per node", last("internode_bytes"), size, "per step, to others"),
        ("memory", max(run.finite("memory_bytes"), default=None), size, _memory_of(run)),
    ]
    return facts + [(name, text(x), remark) for name, x, text, remark in others if x is not None]


def _memory_of(run: RunData) -> str:
    of_host = run.summary.get("device_kind") == "cpu"
    return "most, of the first process" if of_host else "most, on its fullest device"


def _main_chart(run: RunData) -> Chart | None:
    """The chart of the loss; for post-training with rewards, the chart of the reward."""
    name, unit = ("reward", "mean") if "reward" in run.columns else ("loss", _loss_unit(run))
    validation = Series("validation", *run.series(f"validation_{name}"), "dots")
    series = [*smoothed("training", *run.series(name)), validation]
    return _draw(run, name.capitalize(), unit, series, marks=run.skipped, width=1160, height=320)


def _loss_unit(run: RunData) -> str:
    """The unit of the loss, which is a mean over pairs in a run on preferences."""
    return "mean over pairs" if "accuracy" in run.columns else "nats per token"


def _charts(run: RunData) -> list[Chart]:
    """All charts but the first: for preferences, PPO's critic and routers, then the charts of every run."""

    def mean(name: str, key: str) -> list[Series]:
        return smoothed(name, *run.series(key), rate=key in RATES)

    def line(name: str, key: str, look: Literal["line", "dots"] = "line") -> Series:
        return Series(name, *run.series(key), look)

    accuracy = [*mean("training", "accuracy"), line("validation", "validation_accuracy", "dots")]
    rewards = [line("chosen", "rewards_chosen"), line("rejected", "rewards_rejected")]
    tokens, mfu = mean("tokens/s", "tokens_per_second"), mean("MFU", "mfu")
    explained, entropy = [line("variance", "explained_variance")], mean("entropy", "router_entropy")
    # Charts are shown in pairs: the step time makes up for a missing or added one.
    seconds = mean("step", "step_seconds") if "mfu" in run.columns else []
    place = _memory_of(run).replace("most", "most so far")
    draw, marked = partial(_draw, run), partial(_draw, run, marks=run.skipped)
    level = partial(_draw, run, from_zero=True, capped=True)
    found = [
        marked("Accuracy", "of pairs", accuracy, label=percent),
        marked("Rewards", "mean of the responses", rewards),
        marked("Value loss", "of the critic", mean("loss", "value_loss")),
        draw("Explained variance", "of the returns, before a rollout's steps", explained),
        marked("Expert load", "busiest expert over the mean, worst layer", mean("load", "expert_load")),
        draw("Router entropy", "nats per token, mean of the layers", entropy, from_zero=True),
        marked("Gradient norm", "before clipping, log scale", mean("norm", "grad_norm"), log=True),
        draw("Learning rate", "", [line("rate", "learning_rate")], from_zero=True),
        level("Throughput", "tokens per second, all devices", tokens),
        level("Model FLOPs utilisation", "of the devices' bf16 peak", mfu, label=percent),
        level("Step time", "", seconds, label=_duration),
        draw("Memory", place, [line("memory", "memory_bytes")], label=size, from_zero=True),
    ]
    return [chart for chart in found if chart is not None]


def _draw(run: RunData, title: str, unit: str, series: Sequence[Series], **options: Any) -> Chart | None:
    """A chart; None if no series has a finite value."""
    last = run.steps[-1] if run.steps else 0
    restarts = [one["step"] for one in run.sessions if isinstance(one.get("step"), int)]
    inside = [step for step in restarts if 0 < step <= last]
    chart = Chart(title, unit, [s for s in series if len(s.steps)], last, restarts=inside, **options)
    return chart if chart.known.size else None


def _session(number: int, session: dict[str, Any], written: float | None) -> dict[str, str]:
    """A row of the table of starts; ``written`` is the time when the last step was recorded."""
    began, ended = session.get("began"), session.get("ended")
    if session.get("status") == "running":
        ended = written
    lasted = "not known"
    # If the clock was set back in between, the difference means nothing.
    if is_time(began) and is_time(ended) and began <= ended:
        lasted = "so far " * (session.get("status") == "running") + _duration(ended - began)
    last, notes = session.get("last_step"), session.get("notes")
    return {
        "number": str(number),
        "began": f"{datetime.fromtimestamp(began, UTC):%Y-%m-%d %H:%M:%S}" if is_time(began) else "not known",
        "steps": f"{session.get('step', 0)} to {'?' if last is None else last}",
        "lasted": lasted,
        "devices": str(session.get("devices", "")),
        "end": str(session.get("status") or "not known"),
        "notes": "; ".join(
            str(note)
            for note in [*(notes if isinstance(notes, list) else ()), session.get("reason")]
            if note is not None
        ),
    }


def _communication(run: RunData) -> dict[str, Any] | None:
    """The bytes that a step sends; None if they are not recorded in the form of ``make_log``."""
    found = run.summary.get("communication")
    if not isinstance(found, dict) or not isinstance(phases := found.get("phases"), dict) or not phases:
        return None
    numbers = [finite(found.get(name)) for name in ("nodes", "between_nodes", "model_bytes", "zero3_bytes")]
    for one in (found, *phases.values()):
        hops = one if isinstance(one, dict) else {}
        numbers += [finite(hops.get(name)) for name in ("local_bytes", "node_bytes")]
    return None if None in numbers or not found["model_bytes"] else found


def _environment(run: RunData) -> list[tuple[str, str]]:
    names = {"devices": "devices", "device_kind": "kind", "processes": "processes", "host": "host"}
    names |= {"system": "system", "command": "command"}
    rows = [(text, str(run.summary[name])) for name, text in names.items() if name in run.summary]
    versions = run.summary.get("versions")
    if isinstance(versions, dict):
        rows += [(str(name), str(version)) for name, version in versions.items()]
    return rows


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60 or not is_time(seconds):
        return f"{seconds:.3g} s"
    return str(timedelta(seconds=round(seconds)))
